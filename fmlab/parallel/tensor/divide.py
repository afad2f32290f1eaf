"""Divide a model's matrices among tensor-parallel ranks, as its plan says."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fmlab.models.convolutional import CausalConv
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import State
from fmlab.parallel.build import Build
from fmlab.parallel.mesh import Axis
from fmlab.parallel.tensor.check import check, vocabularies, vocabulary_under
from fmlab.parallel.tensor.cross_entropy import VocabParallelCrossEntropy
from fmlab.parallel.tensor.functions import (
    copy_forward_sum_backward,
    gather_forward_scatter_backward,
    sum_forward_copy_backward,
)
from fmlab.parallel.tensor.modules import ColumnLinear, RowLinear, VocabEmbedding, VocabLinear
from fmlab.parallel.tensor.sequence import CutStream, Positions

_DIVIDED = ("column", "row", "vocab", "head")


# region apply
def apply(build: Build) -> None:
    """Cut the parameters, and put layers in place that communicate before and behind them.

    Raises ValueError, before anything is changed, for a degree that the model's plan does not allow and for a
    layer that cannot be divided.
    """
    plan = build.need_plan("tensor parallelism")
    check(build.model, plan, build.layout.tensor, build.layout.sequence_parallel)
    axis = build.mesh.axis("tensor")
    sizes = vocabularies(build.model, plan)
    positions = Positions() if build.layout.sequence_parallel else None
    divide_parameters(build, plan, axis)
    _replace_layers(build.model, plan, axis, positions, sizes)
    _replace_losses(build.model, axis, positions, plan, sizes)
    if positions is not None:
        _cut_streams(build, plan, axis, positions)
    _sum_gradients_of_memories(build.model, plan, axis)


# endregion


# region parameters
def divide_parameters(build: Build, plan: ParallelPlan, axis: Axis) -> None:
    """Leave this rank's piece of each divided parameter in the model, and note it in the ledger."""
    ledger = build.ledger
    for name, whole in list(ledger.parameters()):
        rule = plan.rule(name)
        if rule.kind not in _DIVIDED:
            continue
        piece = nn.Parameter(rule.shard(whole.detach(), axis.rank, axis.size), whole.requires_grad)
        copies = rule.copies(whole.shape, axis.size)
        ledger.cut(name, axis, rule, piece, counted=axis.rank % copies == 0)
        if copies > 1:  # each rank's query heads add to the gradient of the key/value head they share
            ledger.add_partial(name, _neighbours(build, copies))
        for each in (name, *ledger.entries[name].aliases):
            owner, _, leaf = each.rpartition(".")
            setattr(build.model.get_submodule(owner), leaf, piece)


# endregion


def _neighbours(build: Build, copies: int) -> Axis:
    """The ranks that hold the same piece as this one, `copies` of them. Every rank calls it."""
    runs = range(0, build.layout.tensor, copies)
    mine = [build.mesh.subset("tensor", range(start, start + copies)) for start in runs]
    return next(axis for axis in mine if axis is not None)


def _replace_layers(
    model: nn.Module, plan: ParallelPlan, axis: Axis, positions: Positions | None, sizes: Mapping[str, int]
) -> None:
    made: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() < 2:
            continue
        rule = plan.rule(f"{name}.weight")
        if isinstance(module, (nn.Conv2d, CausalConv)):
            _hook_convolution(module, rule, axis)
            continue
        if id(module) not in made:
            own = positions if in_stream(name, rule, plan) else None
            made[id(module)] = _layer(module, rule, axis, own, sizes.get(f"{name}.weight", 0))
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = made[id(module)]


def _layer(whole: Any, rule: Rule, axis: Axis, positions: Positions | None, size: int) -> nn.Module:
    if rule.stream:  # f stands where that stream is made, once for all that read it
        whole.out_features, whole.in_features = whole.weight.shape
        return whole
    if rule.kind == "column":
        return ColumnLinear(whole, axis, positions)
    if rule.kind == "row":
        return RowLinear(whole, axis, positions)
    if rule.kind == "vocab":
        if isinstance(whole, nn.Embedding):
            return VocabEmbedding(whole, axis, size)
        return VocabLinear(whole, axis, positions, size)
    return whole


def _sum_gradients_of_memories(model: nn.Module, plan: ParallelPlan, axis: Axis) -> None:
    """f behind the block that makes a stream which matrices of other blocks read (an encoder's output): their
    gradients add up on each rank first, and are summed over ranks once for all layers."""
    blocks: Any = model.blocks
    for name in {rule.stream for rule in plan.rules if rule.stream}:
        maker = max(index for index, block in enumerate(blocks) if name in block.writes)
        run = blocks[maker].forward
        if isinstance(run, CutStream):
            run.join = gather_forward_scatter_backward
        else:
            blocks[maker].forward = _with_f(run, name, axis)


def _with_f(run: Callable[[State], State], name: str, axis: Axis) -> Callable[[State], State]:
    def forward(state: State) -> State:
        state = run(state)
        return state.updated(**{name: copy_forward_sum_backward(state[name], axis)})

    return forward


def in_stream(name: str, rule: Rule, plan: ParallelPlan) -> bool:
    """Whether the matrix of layer `name` stands in a stream that sequence parallelism cuts."""
    index = _block_of(name)
    return not rule.stream and any(s.blocks[0] <= index <= s.blocks[1] for s in plan.streams)


def _block_of(name: str) -> int:
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blocks" and number.isdigit() else -1


def _hook_convolution(module: nn.Module, rule: Rule, axis: Axis) -> None:
    """f before divided output channels, g behind divided input channels (a product without its bias)."""
    if rule.kind == "column":
        module.register_forward_pre_hook(
            lambda _, args: (copy_forward_sum_backward(args[0], axis), *args[1:])
        )
    elif rule.kind == "row":
        module.register_forward_hook(lambda _, args, out: sum_forward_copy_backward(out, axis))


def _replace_losses(
    model: nn.Module, axis: Axis, positions: Positions | None, plan: ParallelPlan, sizes: Mapping[str, int]
) -> None:
    """A cross-entropy over the divided vocabulary wherever one was injected."""
    for name, module in model.named_modules():
        if getattr(module, "cross_entropy", None) is linear_cross_entropy:
            size = vocabulary_under(name, sizes)
            if size:
                index = _block_of(name)
                cut = any(s.blocks[0] <= index <= s.blocks[1] for s in plan.streams)
                loss = VocabParallelCrossEntropy(axis, size, positions if cut else None)
                module.cross_entropy = loss


def _cut_streams(build: Build, plan: ParallelPlan, axis: Axis, positions: Positions) -> None:
    """Run the blocks of each stream on this rank's positions; what stays whole there has a partial
    gradient."""
    blocks: Any = build.model.blocks
    for stream in plan.streams:
        start, stop = stream.blocks
        for index in range(start, stop + 1):
            edges = index == start, index == stop
            blocks[index].forward = CutStream(blocks[index], stream, axis, positions, *edges)
            for name, _ in blocks[index].named_parameters(prefix=f"blocks.{index}"):
                if name in build.ledger.entries and plan.rule(name).kind == "replicate":
                    build.ledger.add_partial(name, axis)
