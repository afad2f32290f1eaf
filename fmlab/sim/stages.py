"""A model cut for a pipeline and divided for tensor parallelism: on shapes, by the model's own plan."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Protocol, cast

import torch
from torch import nn

from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block, State

DIVIDED = {"column": 0, "row": 1, "vocab": 0, "head": 1}  # kind of rule -> the dimension that it divides


class Traceable(Protocol):
    """What a dry run needs of a model; every family of fmlab.models that has a plan is one."""

    blocks: nn.ModuleList

    def parallel_plan(self) -> ParallelPlan: ...
    def prepare(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> State: ...
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Any: ...


@dataclass(frozen=True)
class Weight:
    """One parameter as a rank of the tensor group holds it.

    numel: elements on this rank. divided: whether the tensor group divides it.
    """

    name: str
    numel: int
    divided: bool


def is_layer(block: nn.Module, prefix: str, plan: ParallelPlan) -> bool:
    """Whether a block is one of the model's layers: it has matrices with divisible inputs or outputs."""
    names = (f"{prefix}.{name}" for name, _ in block.named_parameters())
    return any(plan.rule(name).kind in ("column", "row", "expert") for name in names)


def layer_indices(model: Traceable, plan: ParallelPlan) -> list[int]:
    """Positions of the layers among the blocks: what a pipeline shares out evenly.

    Where the plan divides nothing, the blocks of the commonest class are the layers.
    """
    blocks = list(model.blocks)
    found = [i for i, block in enumerate(blocks) if is_layer(block, f"blocks.{i}", plan)]
    if found:
        return found
    commonest = Counter(map(type, blocks)).most_common(1)[0][0]
    return [i for i, block in enumerate(blocks) if type(block) is commonest]


def cut(model: Traceable, chunks: int) -> list[range]:
    """Block indices of each of `chunks` chunks: layers shared out as evenly as they can be, in order.

    What stands before the first layer goes to the first chunk, what follows a layer goes with it. Raises
    ValueError, with the legal numbers, for more chunks than layers or where the plan allows no cut.
    """
    plan = model.parallel_plan()
    layers = layer_indices(model, plan)
    if chunks > len(layers):
        raise ValueError(
            f"{chunks} chunks (pipeline x virtual_stages) for {len(layers)} layers; legal: 1 to {len(layers)}"
        )
    starts = [0, *(layers[i * len(layers) // chunks] for i in range(1, chunks)), len(model.blocks)]
    illegal = sorted(set(starts[1:-1]) - set(plan.cuts))
    if illegal:
        raise ValueError(
            f"{chunks} chunks would cut before block {illegal[0]}, which the model's plan does not allow; "
            f"it may be cut before blocks {list(plan.cuts)}"
        )
    return [range(start, stop) for start, stop in pairwise(starts)]


def check_tensor(model: Traceable, tensor: int) -> None:
    """Raise ValueError, with the legal degrees, unless `tensor` ranks can divide every matrix."""
    if tensor == 1:
        return
    plan = model.parallel_plan()
    found: dict[Any, Any] = {}  # each different division, once: layers repeat them
    for name, parameter in model.named_parameters():
        rule = plan.rule(name)
        found.setdefault((rule.kind, rule.parts, rule.unit, parameter.shape), (name, rule, parameter.shape))
    kinds = {kind for kind, *_ in found}
    if kinds == {"replicate"}:
        raise ValueError(f"tensor={tensor}: the plan of {type(model).__name__} divides no matrix; legal: 1")
    if "expert" in kinds:
        raise ValueError(
            f"tensor={tensor}: {type(model).__name__} has experts, which are divided by expert parallelism; "
            "that is not simulated yet; legal: tensor=1"
        )
    legal = set(range(1, 1025))
    wrong = ""
    for name, rule, shape in found.values():
        degrees = rule.degrees(shape, 1024)
        legal &= set(degrees)
        if tensor not in degrees and not wrong:
            whole = f", in whole heads of {rule.unit}" if rule.unit > 1 else ""
            wrong = f"{tensor} ranks cannot divide {name} {list(shape)} by {rule.kind}{whole}"
    if wrong:
        raise ValueError(f"tensor={tensor}: {wrong}; legal: {', '.join(map(str, sorted(legal)))}")


def weights_of(model: Traceable, index: int, tensor: int) -> list[Weight]:
    """The parameters of block `index` as one of `tensor` ranks holds them, in the order of the module."""
    plan = model.parallel_plan()
    found = []
    for name, parameter in model.blocks[index].named_parameters(prefix=f"blocks.{index}"):
        rule = plan.rule(name)
        numel = prod(share_shape(rule, parameter.shape, tensor))
        found.append(Weight(name, numel, tensor > 1 and rule.kind in DIVIDED))
    return found


def share_shape(rule: Rule, shape: torch.Size, tensor: int) -> list[int]:
    """The shape that Rule.shard gives, without making it: a vocabulary is padded to an even division, and
    key/value heads that are fewer than ranks are copied."""
    sizes = list(shape)
    if rule.kind in DIVIDED:
        dim = DIVIDED[rule.kind]
        sizes[dim] = -(-sizes[dim] // (tensor // rule.copies(shape, tensor)))
    return sizes


@torch.no_grad()
def divide(model: Traceable, index: int, tensor: int, dtype: torch.dtype) -> Block:
    """Block `index`, on meta, with its parameters replaced by a rank's share in `dtype`."""
    plan = model.parallel_plan()
    block = cast(Block, model.blocks[index])
    for name, parameter in list(block.named_parameters(remove_duplicate=False)):
        sizes = share_shape(plan.rule(f"blocks.{index}.{name}"), parameter.shape, tensor)
        module, _, leaf = name.rpartition(".")
        share = nn.Parameter(torch.empty(sizes, dtype=dtype, device="meta"))
        setattr(block.get_submodule(module), leaf, share)
    return block


def signature(block: nn.Module) -> tuple[object, ...]:
    """Equal for blocks that do the same work: class, settings and shapes, but not their position."""
    settings = []
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, bool, tuple, type(None))) and key != "index"
        }
        settings.append((name, type(module).__qualname__, tuple(sorted(plain.items(), key=lambda i: i[0]))))
    shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    return (tuple(map(repr, settings)), shapes)


def ties(model: Traceable, chunks: Sequence[range]) -> list[tuple[str, tuple[int, ...]]]:
    """Tied parameters that several chunks hold: the owner's name, and the chunks."""
    found = []
    for group in model.parallel_plan().tied:
        homes = {int(name.split(".")[1]) for name in group}
        places = tuple(c for c, blocks in enumerate(chunks) if any(i in blocks for i in homes))
        if len(places) > 1:
            found.append((group[0], places))
    return found
