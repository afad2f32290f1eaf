"""How a training step is divided among chips, as far as a simulation needs to know."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fmlab.sim.schedule import SPLIT_BACKWARD, check_schedule

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RECOMPUTE = ("none", "selective", "full")
GRADIENTS = ("same", "fp32")
AXES = ("tensor", "data", "pipeline")


@dataclass(frozen=True)
class Split:
    """Degrees and settings of one training step. The names are those of fmlab.parallel.Layout.

    data:              replicas, each with its own rows of the batch
    zero:              what the replicas divide among themselves: 0 nothing, 1 optimizer states, 2 gradients
                       too, 3 weights too (Rajbhandari et al. 2020, arXiv:1910.02054)
    tensor:            ranks that share each matrix, by the model's parallel plan
    pipeline:          stages
    virtual_stages:    chunks of the model on each stage (schedule "interleaved")
    micro_batches:     parts of a replica's rows, one after the other
    schedule:          "1f1b", "gpipe" or "interleaved"
    recompute:         "none"; "selective": attention's scores and weights are made again in the backward
                       pass; "full": whole layers, from their inputs
    sequence_parallel: between tensor-parallel regions each rank has its share of the positions (Korthikanti
                       et al. 2022, arXiv:2205.05198)
    precision:         of weights, activations and messages. "bf16" and "fp16" keep an fp32 master copy beside
                       two fp32 moments; "fp32" needs none.
    gradients:         element type that gradients are summed and reduced in: "same" as the weights (16 bytes
                       a parameter in all), or "fp32" (18)
    bucket_mb:         data-parallel gradients are sent in buckets of at least so many MiB
    axis_order:        the axis along which ranks are numbered first (neighbours, which share a host) to the
                       last; the order of a Layout will do, its context axis is left out

    Raises ValueError, with the legal values, for what is none of these or would do nothing.
    """

    data: int = 1
    zero: int = 0
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    sequence_parallel: bool = False
    precision: str = "bf16"
    gradients: str = "same"
    bucket_mb: float = 25.0
    axis_order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "virtual_stages", "micro_batches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
        if self.virtual_stages > 1 and self.schedule == "1f1b":
            object.__setattr__(self, "schedule", "interleaved")
        check_schedule(self.schedule, self.pipeline, self.micro_batches, self.virtual_stages)
        if self.schedule in SPLIT_BACKWARD:
            raise ValueError(
                f"schedule={self.schedule!r} splits backward passes, which a dry run charges as a whole; use "
                "'1f1b', 'gpipe' or 'interleaved', or fmlab.sim.schedule.replay_schedule for its bubble alone"
            )
        _one_of("zero", self.zero, range(4))
        _one_of("recompute", self.recompute, RECOMPUTE)
        _one_of("precision", self.precision, tuple(PRECISIONS))
        _one_of("gradients", self.gradients, GRADIENTS)
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb!r}: give a size in MiB above 0, such as 25")
        order = tuple(axis for axis in self.axis_order if axis != "context")
        if sorted(order) != sorted(AXES):
            raise ValueError(
                f"axis_order={tuple(self.axis_order)}: name each of {', '.join(AXES)} once, fastest first"
            )
        object.__setattr__(self, "axis_order", order)
        if self.zero and self.data == 1:
            raise ValueError(f"zero={self.zero} with data=1 divides nothing; set data >= 2 or zero=0")
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "sequence_parallel with tensor=1 divides nothing; set tensor >= 2 or leave it off"
            )
        if self.gradients == "fp32" and self.precision == "fp32":
            raise ValueError("gradients='fp32' with precision='fp32' changes nothing; use gradients='same'")

    @property
    def world_size(self) -> int:
        """Chips that it takes."""
        return self.data * self.tensor * self.pipeline

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights and activations."""
        return PRECISIONS[self.precision]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Element type that gradients are summed and reduced in."""
        return torch.float32 if self.gradients == "fp32" else self.dtype

    def rows(self, global_batch: int) -> int:
        """Rows of one micro-batch. ValueError, with the nearest legal batches, if they do not divide."""
        parts = self.data * self.micro_batches
        if global_batch >= 1 and global_batch % parts == 0:
            return global_batch // parts
        below = global_batch // parts * parts
        nearest = [size for size in (below, below + parts) if size > 0]
        raise ValueError(
            f"a global batch of {global_batch} rows cannot be cut into data x micro_batches = {self.data} x "
            f"{self.micro_batches} = {parts} equal parts; use {' or '.join(map(str, nearest))} rows"
        )

    def check_world(self, chips: int) -> None:
        """Raise ValueError, with what would fit, unless the degrees multiply to the number of chips."""
        if chips == self.world_size:
            return
        rest, left = divmod(chips, self.tensor * self.pipeline)
        fix = f"; data={rest} would use them all" if rest and not left else ""
        raise ValueError(
            f"data x tensor x pipeline = {self.data} x {self.tensor} x {self.pipeline} = {self.world_size}, "
            f"but there are {chips} chips{fix}"
        )

    def single(self) -> "Split":
        """The same precision on one chip, with nothing divided or made again."""
        return replace(Split(), precision=self.precision, gradients=self.gradients)

    # Ranks are numbered by `axis_order`. By default tensor runs fastest, then data, then pipeline, as in
    # Megatron: the group that talks most sits closest together.

    def rank(self, stage: int, replica: int = 0, shard: int = 0) -> int:
        """The rank at these coordinates."""
        place = {"pipeline": stage, "data": replica, "tensor": shard}
        number = 0
        for axis in reversed(self.axis_order):
            number = number * int(getattr(self, axis)) + place[axis]
        return number

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(stage, replica, shard) of a rank."""
        place = {}
        for axis in self.axis_order:
            rank, place[axis] = divmod(rank, int(getattr(self, axis)))
        return place["pipeline"], place["data"], place["tensor"]

    def tensor_group(self, stage: int, replica: int = 0) -> tuple[int, ...]:
        """Ranks that share the matrices of a stage."""
        return tuple(self.rank(stage, replica, shard) for shard in range(self.tensor))

    def other_tensor_groups(self, stage: int, replica: int = 0) -> list[tuple[int, ...]]:
        """The tensor groups of all other stages and replicas, which talk at the same time."""
        mine = self.tensor_group(stage, replica)
        return [group for group in _tensor_groups(self) if group != mine]

    def data_group(self, stage: int, shard: int = 0) -> tuple[int, ...]:
        """Ranks that hold the same weights."""
        return tuple(self.rank(stage, replica, shard) for replica in range(self.data))


@lru_cache(maxsize=16)
def _tensor_groups(split: Split) -> tuple[tuple[int, ...], ...]:
    places = [(stage, replica) for stage in range(split.pipeline) for replica in range(split.data)]
    return tuple(split.tensor_group(*place) for place in places)


def _one_of(name: str, value: object, legal: Sequence[object]) -> None:
    if value not in legal or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is unknown; legal: {', '.join(map(str, legal))}")
