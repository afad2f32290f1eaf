"""What a plan is made of, worked out once: a model, a layout, and how numbers are kept.

`Setup` is what the formulas of memory and time read. It is made by fmlab.planner.plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from fmlab.parallel import Layout
from fmlab.planner.modelshape import ModelShape

PRECISIONS = ("bf16", "fp16", "fp8", "fp4", "tf32", "fp32")
ATTENTION = ("fused", "unfused")
LOGITS = ("chunked", "full")
ACTIVATIONS = ("fmlab", "megatron")


class States(NamedTuple):
    """Bytes for each parameter of weights, gradients, fp32 masters and an optimizer's moments."""

    weights: float
    gradients: float
    masters: float
    moments: float

    @property
    def total(self) -> float:
        return sum(self)


#: How parameters and what belongs to them are kept; the names say the bytes of all together with Adam.
STATES: dict[str, States] = {
    # 16-bit weights and gradients beside fp32 masters: Rajbhandari et al. 2019, arXiv:1910.02054, section 3.1
    "mixed-16": States(2, 2, 4, 8),
    # the same with gradients summed in fp32 (Megatron, NeMo; ml-engineering, training/performance)
    "mixed-18": States(2, 4, 4, 8),
    # all in fp32, products in 16 bits by autocast: what fmlab.parallel trains
    "fp32-16": States(4, 4, 0, 8),
    # all in 16 bits, moments too: small updates are lost
    "pure-8": States(2, 2, 0, 4),
}


@dataclass(frozen=True)
class Setup:
    """A model, a layout and the numbers of one micro-batch.

    rows: of a micro-batch. lengths: positions of a row in each stream.
    precision: of matrix products. states: bytes of a parameter.
    attention: "fused" keeps no scores; "unfused" keeps and moves them. dropout: whether there is any.
    logits: "chunked": a few at a time; "full": all of a micro-batch at once.
    activations: "fmlab", what our blocks keep; "megatron", the published approximation.
    split_experts: tensor ranks divide each expert (Megatron); else they are whole on each (fmlab.parallel).
    """

    shape: ModelShape
    layout: Layout
    rows: int
    lengths: Mapping[str, int]
    precision: str = "bf16"
    states: States = STATES["mixed-16"]
    attention: str = "fused"
    dropout: bool = False
    logits: str = "chunked"
    activations: str = "fmlab"
    recompute: str = "none"
    split_experts: bool = False

    @cached_property
    def stream_bytes(self) -> int:
        """Of a number between the layers: as wide as the weights."""
        return int(self.states.weights)

    @cached_property
    def product_bytes(self) -> int:
        """Of a number that enters a matrix product. (fp8 is made of 16-bit activations on the way.)"""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @cached_property
    def shards(self) -> int:
        """Data ranks that divide the states among themselves, if they do."""
        return self.layout.data // self.layout.replicas

    @cached_property
    def expert_shards(self) -> int:
        """The same for the experts, which the expert ranks have divided already."""
        return max(1, self.shards // self.layout.expert)

    @cached_property
    def stage_of_zero(self) -> int:
        """What the data ranks divide: 0 to 3 as ZeRO counts; fully sharded is 3."""
        return 3 if self.layout.fsdp else self.layout.zero

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal where one layer on one rank has the same work and keeps the same bytes."""
        layout = self.layout
        return (
            self.rows,
            tuple(self.lengths.values()),
            layout.tensor,
            layout.sequence_parallel,
            layout.context,
            layout.context_method,
            layout.context_balance,
            layout.expert,
            tuple(map(self.stride, ("tensor", "context", "data"))),
            self.precision,
            self.states,
            self.attention,
            self.dropout,
            self.logits,
            self.activations,
            self.recompute,
            self.split_experts,
        )

    @cached_property
    def sharding(self) -> tuple[object, ...]:
        """What else decides which states a rank holds."""
        layout = self.layout
        return (
            self.stage_of_zero,
            self.shards,
            self.expert_shards,
            layout.offload,
            layout.bucket_mb,
            layout.data > 1,
            layout.reshard,
        )

    @cached_property
    def without_recompute(self) -> "Setup":
        """The same when nothing is computed again."""
        return replace(self, recompute="none")

    @cached_property
    def _strides(self) -> dict[str, int]:
        found, stride = {}, 1
        for axis in self.layout.axis_order:
            found[axis] = stride
            stride *= getattr(self.layout, axis)
        return found

    def stride(self, axis: str) -> int:
        """How far apart the numbers of neighbours along an axis are."""
        return self._strides[axis]

    def positions(self, stream: str) -> int:
        """Of a micro-batch on a rank: its context ranks divide each row, padded to an even division."""
        return self.rows * -(-self.lengths[stream] // self.layout.context)

    def between(self, stream: str) -> int:
        """Positions of a rank where no matrix is divided: sequence parallelism divides them again."""
        length = -(-self.lengths[stream] // self.layout.context)
        parts = self.layout.tensor if self.layout.sequence_parallel else 1
        return self.rows * -(-length // parts)
