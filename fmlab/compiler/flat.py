"""A function or model as a flat function of tensors: parameters and buffers first, then the arguments.

A graph takes tensors, in an order. The parameters are fetched from the modules at every call, so an optimizer
that updates them in place, or a new tensor in their place, is seen; tied ones are one input.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from fmlab.compiler.errors import CaptureError
from fmlab.compiler.guards import same


@dataclass(frozen=True)
class Input:
    """One tensor that goes into a graph.

    kind: "parameter", "buffer" or "argument". differentiable: whether it gets a gradient.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool

    def check(self, tensor: object) -> None:
        """Raise ValueError unless `tensor` is of the kind that the graph was captured for."""
        if type(tensor) not in (Tensor, nn.Parameter):
            raise ValueError(f"{self.kind} {self.name} must be a plain tensor, got {type(tensor).__name__}")
        assert isinstance(tensor, Tensor)
        now = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        then = (self.shape, self.dtype, self.device, self.differentiable)
        if now != then:
            what = ("shape", "dtype", "device", "requires_grad")
            changed = [
                f"{name} {new}, captured {old}"
                for name, new, old in zip(what, now, then, strict=True)
                if new != old
            ]
            raise ValueError(f"{self.kind} {self.name} has {'; '.join(changed)}; compile again for it")
        if self.moved(tensor) and self.kind != "argument":
            raise ValueError(
                f"{self.kind} {self.name} has strides {tuple(tensor.stride())}, captured {self.stride}; "
                "compile again for it"
            )

    def moved(self, tensor: Tensor) -> bool:
        """Whether the elements lie in another order or distance than at capture."""
        pairs = zip(tensor.shape, tensor.stride(), self.stride, strict=True)
        return any(size > 1 and now != then for size, now, then in pairs)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor in the memory order of the capture, which the graph's views rely on."""
        if not self.moved(tensor):
            return tensor
        pairs = zip(self.shape, self.stride, strict=True)
        if any(size > 1 and stride == 0 for size, stride in pairs):
            return tensor.contiguous()  # it was expanded; what can be viewed there can be viewed here
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).copy_(
            tensor
        )


class Flat:
    """`fn(*args, **kwargs)` as a function of a list of tensors.

    Modules that a plain function refers to by name count: their parameters are inputs too.
    Raises ValueError for example inputs without a tensor, where there are no parameters either.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.fn = fn
        self.module = fn if isinstance(fn, nn.Module) else _Closure(fn)
        self.parameters = dict(self.module.named_parameters())
        self.buffers = dict(self.module.named_buffers())
        self._slots = _slots(self.module, {**self.parameters, **self.buffers})
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.constants = {i: leaf for i, leaf in enumerate(self.leaves) if not isinstance(leaf, Tensor)}
        self.training = [module.training for module in self.module.modules()]
        self.inputs = [
            *(_describe(name, "parameter", p) for name, p in self.parameters.items()),
            *(_describe(name, "buffer", b) for name, b in self.buffers.items()),
            *(_describe(str(i), "argument", self.leaves[i]) for i in self.places),
        ]
        for i, leaf in self.constants.items():
            if type(leaf).__module__ == "numpy":
                raise CaptureError(
                    "state",
                    f"argument {i} is of numpy: its numbers would become part of the graph",
                    "give torch.from_numpy(...), or a Python number",
                )
        if not self.inputs:
            raise ValueError("there is no tensor among the inputs, and no parameter: nothing to capture")
        self._homes = [self._home(name) for name in (*self.parameters, *self.buffers)]
        for entry, tensor in zip(self.inputs, self.tensors(args, kwargs), strict=True):
            entry.check(tensor)

    def _home(self, name: str) -> tuple[nn.Module, str]:
        owner, _, leaf = name.rpartition(".")
        return self.module.get_submodule(owner), leaf

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the graph's order. Raises ValueError for another structure."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.spec:
            raise ValueError(f"the arguments are nested otherwise than at capture: {spec}, then {self.spec}")
        for i, constant in self.constants.items():
            if isinstance(leaves[i], Tensor) or not same(leaves[i], constant):
                raise ValueError(
                    f"argument {i} is {leaves[i]!r} and was {constant!r} at capture, where it became part of "
                    "the graph; compile again for it"
                )
        return [getattr(owner, leaf) for owner, leaf in self._homes] + [leaves[i] for i in self.places]

    def check(self, tensors: Sequence[Tensor], in_order: bool = False) -> None:
        """Raise ValueError unless shapes, dtypes, gradients and train/eval modes are those of the capture.

        in_order: arguments must lie in memory as they did, because the graph counts elements there.
        """
        for entry, tensor in zip(self.inputs, tensors, strict=True):
            entry.check(tensor)
            if in_order and entry.moved(tensor):
                raise ValueError(
                    f"{entry.kind} {entry.name} has strides {tuple(tensor.stride())}, captured "
                    f"{entry.stride}, and the function reads by strides (as_strided); compile again for it"
                )
        if [module.training for module in self.module.modules()] != self.training:
            raise ValueError("a module was in another mode (train or eval) at capture; compile again for it")

    def laid_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a call in the memory order of the capture. To be called without gradients."""
        return [entry.laid_out(tensor) for entry, tensor in zip(self.inputs, tensors, strict=True)]

    def call(self, tensors: Sequence[Tensor]) -> Any:
        """fn with these tensors in the places of parameters, buffers and arguments."""
        names = [*self.parameters, *self.buffers]
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors[len(names) :], strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        values = dict(zip(names, tensors, strict=False))
        given = {slot: values[name] for slot, name in self._slots.items()}
        held = dict(given)  # functional_call writes what the modules hold afterwards back to it
        # not tie_weights: it writes twice to a module of two names, and leaves a tensor of the capture there
        result = functional_call(self.module, held, args, kwargs, tie_weights=False)
        for slot, name in self._slots.items():
            if held[slot] is not given[slot]:
                raise CaptureError(
                    "state",
                    f"{name} is set to another tensor: a graph has no effects",
                    "return the new value and store it outside of the function",
                )
        return result


class _Closure(nn.Module):
    """A plain function, and the modules that it refers to."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn
        bound = getattr(fn, "__self__", None)
        named = {"self": bound} if isinstance(bound, nn.Module) else {}
        if inspect.isfunction(inspect.unwrap(fn)):
            known = inspect.getclosurevars(inspect.unwrap(fn))
            named |= {**known.globals, **known.nonlocals}
        for name, value in named.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def _slots(module: nn.Module, known: Mapping[str, Tensor]) -> dict[str, str]:
    """Each place of a module that holds a parameter or buffer, once -> the name of that tensor.

    A tied tensor has several places; a module that is registered under two names has one all the same.
    """
    names = {id(tensor): name for name, tensor in known.items()}
    found: dict[str, str] = {}
    for path, owner in module.named_modules():
        for leaf, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                found[f"{path}.{leaf}" if path else leaf] = names[id(tensor)]
    return found


def _describe(name: str, kind: str, x: Tensor) -> Input:
    return Input(name, kind, tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad)


def without_leftovers(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """The structure of a result without what else rode along at capture, such as the masks in a State."""
    if spec.is_leaf():
        return spec
    children = (
        spec.children() if hasattr(spec, "children") else spec.children_specs
    )  # torch 2.9 has the latter
    return pytree.TreeSpec(spec.type, _plain(spec.context), [without_leftovers(child) for child in children])


def _plain(context: Any) -> Any:
    if type(context) in (tuple, list):
        return type(context)(_plain(item) for item in context)
    if type(context) is dict:
        return {key: item for key, item in context.items() if not holds_tensors(item)}
    return context


def holds_tensors(thing: Any, depth: int = 3) -> bool:
    """Whether there is a tensor in an object's attributes or elements, `depth` steps down."""
    if isinstance(thing, Tensor):
        return True
    if depth == 0 or isinstance(thing, str | int | float | bool | torch.dtype | None):
        return False
    parts = [*thing.values()] if isinstance(thing, Mapping) else getattr(thing, "__dict__", {}).values()
    parts = thing if isinstance(thing, tuple | list | set) else parts
    return any(holds_tensors(part, depth - 1) for part in parts)
