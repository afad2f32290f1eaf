"""The parallel plan: what a model declares about itself so that a strategy never has to know its class.

A plan says for every parameter how it may be divided among the ranks of a tensor-parallel group, which
parameters are one and the same, and between which blocks a pipeline may cut. `check_plan` proves a plan
against its model before any strategy exists.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from fmlab.models.state import Block, State, live_names

Kind = Literal["column", "row", "vocab", "head", "expert", "replicate"]
_DIM: dict[str, int] = {"column": 0, "row": 1, "vocab": 0, "head": 1, "expert": 0}


@dataclass(frozen=True)
class Rule:
    """How the parameters whose full name matches `pattern` are divided.

    Args:
        kind: "column" divides the output features (dim 0 of weight and bias), "row" the input features (dim
            1), "vocab" the rows of a table, padded with zeros to an even division, "head" dim 1 of a table
            with a column a head, "expert" dim 0 of matrices stacked by expert, "replicate" nothing.
        parts: how many matrices are stacked along that dim (3 for a fused query-key-value); each is
            divided, so that a rank gets the same heads of each.
        unit: smallest piece that may not be torn apart (a head's width).
        shared: with more ranks than units a unit is copied to several of them (key/value heads that are fewer
            than the ranks: each is used by the query heads of `copies` ranks).
        stream: what the matrix is applied to, if not the stream that its block writes (cross-attention's keys
            and values). All that reads this stream of other blocks must then be such matrices, by columns.
    """

    pattern: str
    kind: Kind
    parts: int = 1
    unit: int = 1
    shared: bool = False
    stream: str = ""

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None

    def degrees(self, shape: torch.Size, upto: int) -> list[int]:
        """The numbers of ranks, up to `upto`, among which a parameter of this shape may be divided."""
        if self.kind in ("replicate", "vocab"):
            return list(range(1, upto + 1))
        units = self._units(shape)
        return [
            degree
            for degree in range(1, upto + 1)
            if units % degree == 0 or (self.shared and degree % units == 0)
        ]

    def copies(self, shape: torch.Size, world_size: int) -> int:
        """How many of `world_size` ranks hold the same piece: neighbours, 1 unless units are `shared`."""
        if not self.shared or self._units(shape) >= world_size:
            return 1
        return world_size // self._units(shape)

    def _units(self, shape: torch.Size) -> int:
        return shape[_DIM[self.kind]] // (self.parts * self.unit)

    def shard(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """What `rank` of `world_size` holds of `tensor`. Raises ValueError if it cannot be divided."""
        if self.kind == "replicate":
            return tensor
        if world_size not in self.degrees(tensor.shape, world_size):
            raise ValueError(
                f"{self.pattern}: shape {list(tensor.shape)} cannot be divided among {world_size} ranks in "
                f"whole units of {self.unit} for {self.parts} parts; legal: {self.degrees(tensor.shape, 64)}"
            )
        dim = _DIM[self.kind]
        if self.kind == "vocab":
            tensor = _pad_rows(tensor, -(-len(tensor) // world_size) * world_size)
        copies = self.copies(tensor.shape, world_size)
        pieces = [part.chunk(world_size // copies, dim) for part in tensor.chunk(self.parts, dim)]
        parts = [piece[rank // copies] for piece in pieces]
        return torch.cat(parts, dim).clone()

    def unshard(self, shards: list[Tensor], shape: torch.Size) -> Tensor:
        """The whole tensor of `shape` from all ranks' shards."""
        if self.kind == "replicate":
            return shards[0]
        dim = _DIM[self.kind]
        shards = shards[:: self.copies(shape, len(shards))]
        by_part = zip(*(shard.chunk(self.parts, dim) for shard in shards), strict=True)
        whole = torch.cat([torch.cat(part, dim) for part in by_part], dim)
        return whole[: shape[0]] if self.kind == "vocab" else whole


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


@dataclass(frozen=True)
class Stream:
    """A tensor [b,l,d] of the State of which ranks may each have some positions (sequence parallelism).

    Args:
        name: of the stream.
        like: an input [b,l] with the same positions.
        blocks: the first and the last block that, but for their divided matrices and the attention between
            them, treat each position by itself.
    """

    name: str
    like: str
    blocks: tuple[int, int]


@dataclass(frozen=True)
class ParallelPlan:
    """A model's declaration.

    Args:
        rules: each parameter name must match exactly one.
        tied: groups of names that are one parameter; the first is its owner.
        cuts: block indices i at which a pipeline may cut into blocks[:i] and blocks[i:].
        sequence: names of the inputs [b,l] that may be cut along the sequence, if each part of the model but
            its attention cores treats every position by itself; empty if it does not. See
            fmlab.parallel.context.
        streams: what sequence parallelism may cut between the matrices; see fmlab.parallel.tensor.
        first_token: names of the labels [b] of a whole row that are learned from its first token.
    """

    rules: tuple[Rule, ...]
    tied: tuple[tuple[str, ...], ...]
    cuts: tuple[int, ...]
    sequence: tuple[str, ...] = ()
    streams: tuple[Stream, ...] = ()
    first_token: tuple[str, ...] = ()

    def rule(self, name: str) -> Rule:
        """The one rule for a parameter. Raises ValueError if none or several match."""
        found = [rule for rule in self.rules if rule.matches(name)]
        if len(found) != 1:
            patterns = [rule.pattern for rule in found]
            raise ValueError(
                f"parameter {name!r} must match exactly one rule of the plan, but matches {patterns}"
            )
        return found[0]


class Planned(Protocol):
    """What check_plan and the strategies need of a model."""

    blocks: Sequence[Block]

    def parallel_plan(self) -> ParallelPlan: ...
    def prepare(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> State: ...


def check_places(model: nn.Module, plan: ParallelPlan) -> None:
    """Raise ValueError for a plan that speaks of blocks or parameters which the model does not have."""
    family, blocks = type(model).__name__, len(getattr(model, "blocks", ()))
    if list(plan.cuts) != sorted(set(plan.cuts)) or not all(0 < cut < blocks for cut in plan.cuts):
        raise ValueError(
            f"the plan of {family} may be cut before blocks {list(plan.cuts)}, and the model has {blocks} "
            f"blocks: cuts are ascending, from 1 to {blocks - 1}"
        )
    for stream in plan.streams:
        if not 0 <= stream.blocks[0] <= stream.blocks[1] < blocks:
            raise ValueError(
                f"the plan of {family} has the stream {stream.name!r} in blocks {stream.blocks}, and the "
                f"model has the blocks 0 to {blocks - 1}"
            )
    _check_ties(dict(model.named_parameters(remove_duplicate=False)), plan)


def check_plan(model: nn.Module, batch: dict[str, Tensor], degrees: Iterable[int] = (2, 3, 4)) -> None:
    """Prove a model's plan; raises ValueError with the first thing that is wrong.

    1. Every parameter matches exactly one rule, and every rule matches a parameter.
    2. For each degree a parameter may be divided by, its shards are equal in shape and put together again
       are it, bit for bit.
    3. The tied groups are exactly the parameters that have several names.
    4. Each block reads and writes only what it declares, and for each cut, running the blocks before it,
       sending only the live names and running the rest equals the whole model, bit for bit.

    `batch` is what the model is called with. Dropout must be off: the model runs in eval mode.
    """
    planned = cast(Planned, model)
    plan = planned.parallel_plan()
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in names.items():
        _check_shards(name, parameter.detach(), plan.rule(name), degrees)
    for rule in plan.rules:
        if not any(rule.matches(name) for name in names):
            raise ValueError(f"rule {rule.pattern!r} of the plan matches no parameter")
    check_places(model, plan)
    training = model.training
    try:
        model.eval()
        _check_cuts(planned, batch, plan)
    finally:
        model.train(training)


def _check_shards(name: str, parameter: Tensor, rule: Rule, degrees: Iterable[int]) -> None:
    for degree in degrees:
        if degree not in rule.degrees(parameter.shape, degree):
            continue
        shards = [rule.shard(parameter, rank, degree) for rank in range(degree)]
        if len({shard.shape for shard in shards}) != 1:
            raise ValueError(f"{name}: shards differ in shape: {[list(shard.shape) for shard in shards]}")
        if not torch.equal(rule.unshard(shards, parameter.shape), parameter):
            raise ValueError(f"{name}: {degree} shards put together again are not the parameter")


def _check_ties(names: dict[str, nn.Parameter], plan: ParallelPlan) -> None:
    groups: dict[int, list[str]] = {}
    for name, parameter in names.items():
        groups.setdefault(id(parameter), []).append(name)
    found = {tuple(sorted(group)) for group in groups.values() if len(group) > 1}
    declared = {tuple(sorted(group)) for group in plan.tied}
    if found != declared:
        raise ValueError(f"the plan declares the ties {sorted(declared)}, the model has {sorted(found)}")


@torch.no_grad()
def _check_cuts(model: Planned, batch: dict[str, Tensor], plan: ParallelPlan) -> None:
    blocks = list(model.blocks)
    states = [model.prepare(**batch)]
    for block in blocks:
        before = states[-1]
        after = block(before)
        alone = block(before.only(block.reads))
        changed = {name for name in after if name not in before or after[name] is not before[name]}
        if not changed <= set(block.writes):
            raise ValueError(
                f"{type(block).__name__} writes {sorted(changed - set(block.writes))} undeclared"
            )
        if not all(torch.equal(alone[name], after[name]) for name in changed):
            raise ValueError(f"{type(block).__name__} depends on a name that it does not declare in reads")
        states.append(after)
    results = sorted(changed)  # what the last block wrote
    for cut in plan.cuts:
        state = states[cut].only(live_names(blocks, cut))
        for block in blocks[cut:]:
            state = block(state)
        wrong = [n for n in results if n not in state or not torch.equal(state[n], states[-1][n])]
        if wrong:
            raise ValueError(f"cut before block {cut}: {wrong} differ from the whole model's")
