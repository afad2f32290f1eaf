"""What fully sharded training must send and hold, from shapes alone.

For M bytes of parameters on W ranks, each rank sends in a ring (Zhao et al. 2023, section 3.2.2):

    replicated (DDP)            2 M (W-1)/W           an all-reduce of the gradients
    sharded, kept (reshard no)  2 M (W-1)/W           gather, reduce-scatter
    sharded, given back         3 M (W-1)/W           gather, gather again, reduce-scatter
    hybrid, F ranks a copy      the same with F for W, and 2 (M/F) (R-1)/R between the R copies

What is counted here for one engine differs a little, and says how: the last unit is not given back between
its forward and its backward pass, the root unit is gathered once a step, and rows are padded to equal chunks.
"""

from dataclasses import dataclass

from torch import nn

from fmlab.parallel.ddp.cost import ring_bytes
from fmlab.parallel.fsdp.chunks import chunk_rows
from fmlab.parallel.fsdp.units import blocks_of, homes_of
from fmlab.parallel.layout import Layout


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's units, padded to equal chunks: the root's, and the others' in order."""

    root: int
    units: tuple[int, ...]

    @property
    def total(self) -> int:
        """Of the whole model."""
        return self.root + sum(self.units)


def sizes(model: nn.Module, ranks: int, itemsize: int | None = None) -> Sizes:
    """The units of `model` when `ranks` divide it; with `itemsize` bytes a number, or those that it has."""
    blocks = blocks_of(model)
    homes = homes_of(model, blocks)
    found = dict.fromkeys(range(-1, len(blocks)), 0)
    for p in model.parameters():
        rows = len(p) if p.dim() else 1
        padded = ranks * chunk_rows(rows, ranks) * (p.numel() // max(rows, 1))
        found[homes[id(p)]] += padded * (itemsize or p.element_size())
    root = found.pop(-1)
    return Sizes(root, tuple(size for size in found.values() if size))


# region payload
def expected_payload(model: nn.Module, layout: Layout, terms: int = 1) -> dict[str, int]:
    """Payload of a step by collective, for fsdp alone on a model in fp32 that is trained as a whole.

    "all_gather" and "reduce_scatter" are whole units; "all_reduce" is all else: counts of targets, losses and
    use of parameters, the norm, and the gradients between copies.
    """
    shards = layout.data // layout.replicas
    unit, n = sizes(model, shards), layout.micro_batches
    passes = 2 * sum(unit.units) - unit.units[-1] if layout.reshard else 0
    gathered = n * passes if layout.reshard else sum(unit.units)
    numbers = 8 * terms + 4 * (terms + 1 + len(list(model.parameters()))) + 4
    between = unit.total // shards if layout.replicas > 1 else 0
    return {
        "all_gather": unit.root + gathered,
        "reduce_scatter": unit.root + n * sum(unit.units),
        "all_reduce": numbers + between,
    }


# endregion


def expected_bytes(model: nn.Module, layout: Layout) -> float:
    """Bytes of parameters and gradients that each rank sends in a step, by rings; small numbers left out."""
    shards = layout.data // layout.replicas
    payload = expected_payload(model, layout)
    inside = ring_bytes("all_gather", payload["all_gather"] + payload["reduce_scatter"], shards)
    between = sizes(model, shards).total / shards if layout.replicas > 1 else 0
    return inside + ring_bytes("all_reduce", between, layout.replicas)


def paper_peak(unit: Sizes, shards: int, low: float = 1.0) -> float:
    """Peak bytes of parameters by the paper's formula, K_full / F sum(psi) + K_low max(psi).

    low: bytes of a gathered number in terms of a stored one (0.5 for bfloat16 beside fp32).
    """
    return unit.total / shards + low * max(unit.root, *unit.units)


def expected_peak(unit: Sizes, shards: int, low: float = 1.0) -> float:
    """The same for this engine: the root unit stays, and a unit is there twice while its chunks are copied
    to where they belong.

    Prefetching is in that already: the next unit's chunks arrive while one unit is whole, and both together
    are no more than the largest twice. Where numbers are cast before they are sent (low below 1), there is
    also what this rank sends.
    """
    largest = max(unit.units, default=0)
    sent = low * max(unit.root, largest) / shards if low < 1 else 0
    return unit.total / shards + sent + low * max(2 * unit.root, unit.root + 2 * largest)
