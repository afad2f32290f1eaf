"""A first run on tensors without data, which finds what a graph cannot hold before one is made.

A graph holds operators on tensors and nothing else: no `if` on a value, no shape that only values tell, no
change of what exists outside. Each of these is found here with the line it stands on. What Python does on the
side without a tensor or a value that the function reads (a print, a file) happens at capture alone and is not
found.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab.compiler.effects import Made, draws_kept
from fmlab.compiler.errors import CaptureError, Line, explained, line_here
from fmlab.compiler.flat import Flat, holds_tensors, without_leftovers
from fmlab.compiler.guards import Guards


@dataclass
class Survey:
    """What a run without data showed.

    outputs: the leaves that the function returns. spec: how they are nested. passed: output -> the input that
    it is. functions: names of autograd.Functions whose own backward led to an output. guards: the Python
    values that it read.
    """

    outputs: list[Any]
    spec: pytree.TreeSpec
    passed: dict[int, int] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    guards: Guards | None = None


def survey(flat: Flat, fakes: Sequence[FakeTensor], mode: FakeTensorMode) -> Survey:
    """Run `flat` on `fakes`. Raises CaptureError for what a graph cannot hold."""
    made = Made()

    def run() -> Any:
        with _attributes_kept(flat.module), _Recurrent(), mode, _Writes(flat, fakes, made), compiling():
            try:
                return flat.call(fakes)
            except (CaptureError, ValueError):
                raise  # ours, or what the function itself says of its inputs
            except Exception as error:
                raise explained(error) from error

    with draws_kept(run):
        result = run()
    torch.clear_autocast_cache()  # which keeps casts of parameters, here of those without data
    guards = Guards(flat.module, flat.fn, list(flat.constants.values()))
    found = _looked_at(flat, fakes, *pytree.tree_flatten(result))
    del result
    made.refuse_kept({id(x) for x in (*fakes, *found.outputs)})
    found.guards = guards  # after a run: what only the first one sets, such as a cache of numbers, may be set
    return found


def _looked_at(flat: Flat, fakes: Sequence[FakeTensor], outputs: list[Any], spec: pytree.TreeSpec) -> Survey:
    """What the outputs of a run tell; CaptureError for views of inputs and for lost gradients."""
    found = Survey(outputs, without_leftovers(spec))
    owners = {_storage(fake): index for index, fake in enumerate(fakes)}
    for place, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            if holds_tensors(output):
                raise CaptureError(
                    "operator",
                    f"output {place} is a {type(output).__name__}: torch's pytree does not know its tensors",
                    "return tuples, lists and dicts, or register the class with torch.utils._pytree",
                )
            continue
        same = [index for index, fake in enumerate(fakes) if fake is output]
        if same:
            found.passed[place] = same[0]
        elif _storage(output) in owners:
            owner = flat.inputs[owners[_storage(output)]]
            raise CaptureError(
                "alias",
                f"output {place} is a view of {owner.kind} {owner.name}: a graph would return a copy",
                "return a .clone() of it",
            )
    found.functions = _functions([o for o in outputs if isinstance(o, Tensor)], fakes)
    inputs = {id(fake) for fake in fakes}
    found.outputs = [_alone(x) if isinstance(x, FakeTensor) and id(x) not in inputs else x for x in outputs]
    return found


class _Writes(TorchDispatchMode):
    """Refuses every operator that writes to memory of an input or draws from a generator of its own."""

    def __init__(self, flat: Flat, fakes: Sequence[FakeTensor], made: Made):
        super().__init__()
        self.inputs = {_storage(fake): entry for fake, entry in zip(fakes, flat.inputs, strict=True)}
        self.made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        statistics = "batch_norm" in func._schema.name  # written to in training, which the schema hides
        if func._schema.is_mutable or statistics:
            given = {
                argument.name: args[place] if place < len(args) else kwargs.get(argument.name)
                for place, argument in enumerate(func._schema.arguments)
            }
            for argument in func._schema.arguments:
                written = argument.alias_info is not None and argument.alias_info.is_write
                hidden = statistics and argument.name in ("running_mean", "running_var")
                if written or (hidden and given.get("training", True)):
                    for tensor in pytree.tree_leaves(given[argument.name]):
                        self._refuse(func, tensor)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError(
                "state",
                f"{func._schema.name} draws from a generator of its own, whose state a graph does not hold",
                "draw from torch's own generator, or outside of the function",
                line_here(),
            )
        result = func(*args, **kwargs)
        self.made.note(result)
        return result

    def _refuse(self, func: Any, tensor: Any) -> None:
        entry = self.inputs.get(_storage(tensor)) if isinstance(tensor, Tensor) else None
        if entry is not None:
            raise CaptureError(
                "mutation",
                f"{func._schema.name} changes {entry.kind} {entry.name} in place: a graph has no effects",
                "return the new value and store it outside of the function",
                line_here(),
            )


class _Recurrent(TorchFunctionMode):
    """Refuses dropout between the layers of a recurrent network: torch's own way to take such a network apart
    leaves it out (torch 2.9 to 2.13: torch/_decomp/decompositions.py, _rnn_helper)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) == 9:
            packed = isinstance(args[1], Tensor) and isinstance(args[3], tuple | list)
            layers, dropout, train = args[5:8] if packed else args[4:7]
            if train and dropout and layers > 1:
                raise CaptureError(
                    "operator",
                    f"{func.__name__} with dropout {dropout} between its {layers} layers: torch's graph of "
                    "it has no dropout",
                    "set dropout=0, call eval(), or use one-layer modules with nn.Dropout between them",
                    line_here(),
                )
        return func(*args, **(kwargs or {}))


def _alone(output: FakeTensor) -> Tensor:
    """The same tensor without what led to it."""
    return output.detach().requires_grad_(output.requires_grad)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _functions(outputs: Sequence[Tensor], fakes: Sequence[Tensor]) -> list[str]:
    """Names of the autograd.Functions behind `outputs`; CaptureError for gradients that would get lost."""
    known = {id(fake) for fake in fakes}
    names: list[str] = []
    stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            names.append(type(node).__name__.removesuffix("Backward"))
        if hasattr(node, "variable") and id(node.variable) not in known:
            raise CaptureError(
                "gradient",
                f"a tensor {list(node.variable.shape)} that requires a gradient is neither an argument nor a "
                "parameter of a module that the function names: its gradient would get lost",
                "pass it as an argument, or compile the module that owns it",
            )
        stack += [parent for parent, _ in node.next_functions]
    return sorted(set(names))


@contextmanager
def compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` holds: models leave out checks that would read values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Refuse tensors that the run stored in attributes of modules, and put back what was there."""
    before = {owner: dict(vars(owner)) for owner in module.modules()}
    try:
        yield
    finally:
        stored: list[tuple[nn.Module, str]] = []
        for owner, old in before.items():
            for name, value in list(vars(owner).items()):
                if isinstance(value, FakeTensor):
                    stored.append((owner, name))
                    del vars(owner)[name]
                    if name in old:
                        vars(owner)[name] = old[name]
    if stored:
        owner, name = stored[0]
        raise CaptureError(
            "state",
            f"{type(owner).__name__}.{name} is set to a tensor: a graph has no effects",
            "return it and store it outside of the function",
            _line_that_sets(owner, name),
        )


def _line_that_sets(owner: nn.Module, name: str) -> Line | None:
    try:
        lines, first = inspect.getsourcelines(type(owner).forward)
        file = inspect.getsourcefile(type(owner).forward) or ""
    except (OSError, TypeError):
        return None
    for number, text in enumerate(lines, first):
        if re.search(rf"self\.{name}\s*(:[^=]+)?=[^=]", text):
            return Line(file, number, text.strip())
    return None
