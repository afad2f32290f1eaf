"""What the stages of a pipeline must agree on before they send each other anything, in one small message."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fmlab.parallel.layout import Batch
from fmlab.parallel.mesh import Axis
from fmlab.parallel.pipeline.messages import Signature, signature

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# region agree
def agree(batches: Sequence[Batch], changed: bool, stages: Axis, device: torch.device) -> bool:
    """Whether `changed` on some stage. Every stage calls it, with its micro-batches.

    Raises ValueError on all stages unless all have the same micro-batches: as many, of the same shapes and
    contents. Otherwise they would wait for messages that nobody sends, or learn from other labels than what
    they have read.
    """
    shapes = [signature(batch) for batch in batches]
    marks = torch.tensor([len(batches), zlib.crc32(repr(shapes).encode())], dtype=torch.int64, device=device)
    content = [_content(batch[name].to(device)) for batch in batches for name in sorted(batch)]
    contents = torch.stack(content).sum().reshape(1) if content else marks.new_zeros(1)
    mine = torch.cat([marks, contents])
    news = torch.cat([mine, -mine, marks.new_tensor([int(changed)])])
    *numbers, any_changed = stages.all_reduce_(news, op="max").tolist()
    highest, lowest = numbers[: len(mine)], [-n for n in numbers[len(mine) :]]
    if highest != lowest:
        raise ValueError(_difference(shapes, stages))
    return bool(any_changed)


# endregion


def _content(tensor: Tensor) -> Tensor:
    """A number, int64 [], that differs for other values or another order of rows; the same on any machine."""
    kind = torch.uint8 if tensor.dtype == torch.bool else _INTEGERS.get(tensor.element_size())
    if kind is None or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    bits = tensor.detach().contiguous().view(kind) if tensor.dim() else tensor.detach().reshape(1).view(kind)
    rows = bits.reshape(len(bits), -1).sum(1, dtype=torch.int64)
    return (rows * torch.arange(1, len(rows) + 1, device=tensor.device)).sum()


def _difference(shapes: Sequence[Signature], stages: Axis) -> str:
    every = stages.gather_objects(list(shapes))
    numbers = [len(theirs) for theirs in every]
    why = "their tensors hold different values"
    if len(set(numbers)) > 1:
        why = f"stage by stage there are {numbers} with targets"
    elif other := next((i for i, theirs in enumerate(every) if theirs != every[0]), 0):
        place = next(i for i, (a, b) in enumerate(zip(every[0], every[other], strict=True)) if a != b)
        why = (
            f"micro-batch {place} is {every[0][place]} on stage 0 and {every[other][place]} on stage {other}"
        )
    return (
        f"all stages of a pipeline need the same micro-batches, but {why}; give every rank with the same "
        "place on the data axis (layout.data_rank(rank)) the same data"
    )
