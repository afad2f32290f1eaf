"""From a function or model to graphs: one for its forward pass, one for its backward pass.

torch differentiates: AOTAutograd runs the function and torch.autograd.grad on tensors without data, under a
mode that notes every ATen operator and replaces those that write in place. The joint graph that comes out is
cut in two; what the backward half needs of the forward half is saved between them.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fmlab.compiler import graph as g
from fmlab.compiler.errors import CaptureError, explained
from fmlab.compiler.flat import Flat
from fmlab.compiler.passes.base import Pass, Report
from fmlab.compiler.source import rewritten
from fmlab.compiler.survey import Survey, compiling, survey

#: How the joint graph may be cut: keep what eager autograd keeps, or the fewest bytes and compute again.
PARTITIONS: dict[str, Callable[..., Any]] = {
    "default": default_partition,
    "min-cut": min_cut_rematerialization_partition,
}
FALLBACKS = (None, "eager")
_ONE_AT_A_TIME = threading.RLock()  # torch's tracers change modules for the whole process while they trace


@dataclass
class Program:
    """A captured function.

    forward: (inputs) -> (results, then what the backward graph needs). backward: (saved, then a gradient for
    each differentiable result) -> a gradient or None for each input; None without gradients.
    flat: inputs and how a call is laid out. found: the leaves of the function's own result.
    results: which leaves the graph gives. differentiable: which of those have a gradient.
    autocast: the state of automatic casts, see autocast_state.
    reports: (graph, report) of each pass so far. notes: what was left out, and why.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    flat: Flat
    found: Survey
    results: list[int]
    differentiable: list[bool]
    autocast: dict[str, torch.dtype | None]
    reports: list[tuple[str, Report]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def copy(self) -> "Program":
        """The same program with graphs of its own, to try other passes on; parameters are shared."""
        flat = copy.copy(self.flat)
        flat.inputs = list(self.flat.inputs)  # a pass may change what there is of each
        made = replace(
            self,
            flat=flat,
            forward=copy.deepcopy(self.forward),
            backward=copy.deepcopy(self.backward),
            reports=list(self.reports),
            notes=list(self.notes),
        )
        made.forward.meta["inputs"] = flat.inputs
        if made.backward is not None:
            made.backward.meta["gradients_of"] = flat.inputs
            _pair(made.forward, made.backward)
        return made

    @property
    def graphs(self) -> dict[str, fx.Graph]:
        """The graphs by name: "forward" and, where there is one, "backward"."""
        found = {"forward": self.forward.graph}
        return found if self.backward is None else found | {"backward": self.backward.graph}

    @property
    def saved(self) -> list[fx.Node]:
        """Nodes of the forward graph that are kept for the backward graph."""
        return list(_outputs(self.forward))[len(self.results) :]

    @property
    def saved_bytes(self) -> int:
        """Bytes that are kept and that are not inputs, counting memory that several share once."""
        kept = {root(node): node for node in self.saved if root(node).op != "placeholder"}
        return sum(max(g.nbytes(node), g.nbytes(owner)) for owner, node in kept.items())

    def __str__(self) -> str:
        return "\n\n".join(f"# {name}\n{g.text(graph)}" for name, graph in self.graphs.items())


class Eager(nn.Module):
    """A function that was not captured, and runs as it is. why: what stood in the way."""

    def __init__(self, fn: Callable[..., Any], why: CaptureError):
        super().__init__()
        self.fn, self.why = fn, why

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def capture(
    fn: Callable[..., Any],
    *example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = True,
    partition: str = "default",
    fallback: str | None = None,
    rewrites: Sequence[Pass] = (),
) -> Program | Eager:
    """Capture `fn(*example_inputs, **kwargs)`, a function or a module, as graphs of ATen operators.

    The graphs hold for these shapes, dtypes, modes, non-tensor arguments, and numbers that the function
    reads from its modules and names. Parameters of the module, and of modules that a function names, are
    inputs of the graphs, never constants. Threads capture one after the other, and should run no module
    meanwhile: torch's tracer changes what a call of a module does for the whole process.

    Args:
        backward: make a backward graph too; False gives results without gradients.
        partition: "default" or "min-cut", see PARTITIONS.
        fallback: "eager" returns an `Eager` instead of raising CaptureError.
        rewrites: passes that change the function before it is differentiated; their reports, or why they were
            left out, are in the program.

    Raises CaptureError (a ValueError), with the line of the user's code, for a branch on a value, a shape
    that depends on values, a change of an input, parameter, buffer, attribute or counter, a tensor that is
    kept elsewhere, numbers that Python draws, a view of an input as a result, a gradient that would get
    lost, and an operator without a rule for its shape.
    """
    if partition not in PARTITIONS:
        raise ValueError(f"partition {partition!r} is unknown; legal: {list(PARTITIONS)}")
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback {fallback!r} is unknown; legal: {list(FALLBACKS)}")
    try:
        with _ONE_AT_A_TIME:
            return _capture(fn, example_inputs, dict(kwargs or {}), backward, partition, rewrites)
    except CaptureError as error:
        if fallback is None:
            raise
        return Eager(fn, error)


def _capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    backward: bool,
    partition: str,
    rewrites: Sequence[Pass],
) -> Program:
    flat = Flat(fn, args, kwargs)
    casts = autocast_state(flat)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x, static_shapes=True) for x in flat.tensors(args, kwargs)]
    with torch.set_grad_enabled(backward):
        found = survey(flat, fakes, mode)
    results = [
        place
        for place, leaf in enumerate(found.outputs)
        if isinstance(leaf, Tensor) and place not in found.passed
    ]
    differentiable = [found.outputs[place].requires_grad for place in results]
    if not results:
        raise ValueError("the function returns no tensor that it made: there is nothing to capture")
    if backward and not any(differentiable):
        raise ValueError(
            "no result requires a gradient, so there is no backward graph; ask for backward=False, or give "
            "inputs or parameters that require one"
        )
    call, reports, notes = rewritten(flat, args, kwargs, found, rewrites)
    joint = trace(call, fakes, results, backward)
    forward, back = joint, None
    if backward:
        forward, back = PARTITIONS[partition](joint, fakes, num_fwd_outputs=len(results))
        _drop_copies(forward, back)
        _check_saved(forward, back, len(results))
        back.meta["gradients_of"] = flat.inputs
        back.meta["tangents"] = sum(differentiable)  # the last inputs: a gradient for each of these results
        _pair(forward, back)
    forward.meta["inputs"] = flat.inputs
    forward.meta["results"] = len(results)  # what follows them is for the backward graph, not for the caller
    if found.guards is not None:
        found.guards.kept(lambda: survey(flat, fakes, mode))
    return Program(forward, back, flat, found, results, differentiable, casts, reports, notes)


def autocast_state(flat: Flat) -> dict[str, torch.dtype | None]:
    """Kind of device of the inputs -> the dtype that torch.autocast casts to there, None if it is off."""
    kinds = sorted({entry.device.type for entry in flat.inputs})
    on = [kind for kind in kinds if kind != "meta" and torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) if kind in on else None for kind in kinds}


def trace(
    call: Callable[[Sequence[Tensor]], Any],
    fakes: Sequence[FakeTensor],
    results: Sequence[int],
    backward: bool,
) -> fx.GraphModule:
    """The joint graph: inputs, gradients of results -> results, gradients of inputs. Or the forward one."""

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = pytree.tree_leaves(call(tensors))
        # A result that is a view would be returned with its base. The same memory under another name is not.
        return tuple(torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x for x in picked(leaves))

    def picked(leaves: Sequence[Any]) -> list[Tensor]:
        return [leaves[place] for place in results]

    with compiling(), torch.set_grad_enabled(backward):
        try:
            joint = aot_export_joint_simple(of_tensors, tuple(fakes), trace_joint=backward)
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error) from error
    assert isinstance(joint, fx.GraphModule)
    _tidy(joint)
    return joint


def _pair(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Let a pass over one graph find the other, to change what is handed over between them."""
    forward.meta["backward"], backward.meta["forward"] = backward, forward


def _tidy(module: fx.GraphModule) -> None:
    """Drop what only speaks to autograd or to a checker: detach, asserts of known dtypes; and attention that
    nobody reads, which torch's partitioner would keep as if it drew random numbers."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    for node in reversed(list(module.graph.nodes)):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
        elif node.target is torch.ops.aten.detach.default and output not in node.users:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif not node.users and g.is_pure(node):
            module.graph.erase_node(node)
    module.recompile()


def _drop_copies(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Drop what the partitioner leaves of the forward pass in the backward graph although nothing reads it.

    It keeps every operator that may draw random numbers: run again, it would cost time and draw once more.
    """
    run = {node.name for node in forward.graph.nodes}
    for node in reversed(list(backward.graph.nodes)):
        if node.op == "call_function" and not node.users and node.name in run:
            backward.graph.erase_node(node)
    backward.recompile()


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    return next(node for node in module.graph.nodes if node.op == "output").args[0]


def _check_saved(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """The two halves must agree on what is handed over, in order."""
    saved = [node.name for node in _outputs(forward)[results:]]
    taken = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
    assert taken[: len(saved)] == saved, (saved, taken)


def root(node: fx.Node) -> fx.Node:
    """The node whose memory this one's result lies in."""
    while g.is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node
