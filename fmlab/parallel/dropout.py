"""Which dropout masks a rank draws: those of the whole, of which its layout gives it a part.

A mask is a function of (seed, step, block, place, number of the element), see fmlab.models.dropout. An engine
numbers the steps and the rows of the global batch, its layout the positions, heads and features that this
rank holds; so one device, any layout and a second forward pass draw the same masks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from fmlab.models.dropout import (
    Masks,
    Numbers,
    begin_block,
    chunk_number,
    current_masks,
    from_number,
    holding,
)
from fmlab.parallel.context.positions import columns_of, indices
from fmlab.parallel.layout import Batch, Layout


class MicroBatch(dict[str, torch.Tensor]):
    """A micro-batch that knows the number of its first row in the global batch."""

    first_row: int = 0


def numbered(batch: Batch, first_row: int) -> MicroBatch:
    """The same batch, with the number of its first row."""
    batch = MicroBatch(batch)
    batch.first_row = first_row
    return batch


def number_rows(micro_batches: Sequence[Batch], first_row: int) -> list[Batch]:
    """The micro-batches one after the other, the first of which begins with row `first_row`."""
    found: list[Batch] = []
    for batch in micro_batches:
        found.append(numbered(batch, first_row))
        first_row += rows_of(batch)
    return found


def rows_of(batch: Batch) -> int:
    """How many rows a batch has: dim 0 of its tensors."""
    return len(next(iter(batch.values()))) if batch else 0


def drops(model: nn.Module) -> bool:
    """Whether some module of `model` calls `drop_out`: it has a probability above 0 named ...dropout."""
    return any(
        name.endswith("dropout") and isinstance(value, float) and value > 0
        for module in model.modules()
        for name, value in vars(module).items()
    )


def number_blocks(model: nn.Module) -> Callable[[], None]:
    """Let masks know which block of the model is running; returns what takes the hooks off again."""
    blocks: Sequence[nn.Module] = getattr(model, "blocks", ())
    handles = [
        block.register_forward_pre_hook(lambda *_, number=number: begin_block(number))
        for number, block in enumerate(blocks)
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def masks_of(layout: Layout, rank: int, seed: int, step: int, first_row: int) -> Masks:
    """The masks of the forward pass of a micro-batch on `rank`, whose rows begin with `first_row`."""
    return Masks(seed, step, {"b": from_number(first_row), **held(layout, layout.grid().coordinates(rank))})


# region held
def held(layout: Layout, where: Mapping[str, int]) -> dict[str, Numbers]:
    """Which positions, heads and inner features the rank at these coordinates has of the whole."""
    numbers: dict[str, Numbers] = {}
    if layout.tensor > 1:
        numbers["f"] = numbers["h"] = chunk_number(where["tensor"])
    if layout.context > 1:
        balance = layout.context_balance if layout.context_method == "ring" else "none"
        numbers["q"] = numbers["l"] = _columns(where["context"], layout.context, balance)
    return numbers


# endregion


def holding_part(length: int, rank: int, ranks: int) -> AbstractContextManager[None]:
    """Inside, the stream between layers has only the `rank`-th part of this rank's `length` positions
    (sequence parallelism); the last parts are padded, with positions that nobody reads."""
    masks = current_masks()
    if masks is None:
        return nullcontext()
    size = -(-length // ranks)
    part = masks.numbers_of("q", length)[rank * size : (rank + 1) * size]
    if len(part) < size:
        part = torch.tensor([*part, *[-1] * (size - len(part))])
    return holding(l=lambda n: part)


def _columns(rank: int, ranks: int, balance: str) -> Numbers:
    def numbers(n: int) -> range | torch.Tensor:
        columns = columns_of(rank, ranks, n * ranks, balance)
        return columns[0] if len(columns) == 1 else indices(columns)

    return numbers
