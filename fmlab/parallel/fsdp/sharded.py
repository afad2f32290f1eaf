"""One parameter of which every rank keeps some rows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fmlab.parallel.fsdp.chunks import chunk_rows
from fmlab.parallel.fsdp.memory import give_back


@dataclass
class Sharded:
    """A parameter in its two forms; the modules that own it see one or the other.

    shard: [rows of this rank, ...], what the optimizer updates; its gradient is the sum over all ranks
    full:  [rows, ...], what the forward pass reads; memory only while it is gathered. The gradient that
           autograd gives it is this rank's summand.
    room:  [ranks x chunk], the memory of `full`, a little longer where the chunks are not equal
    chunk: numbers of a full chunk
    order: its dims in the order in which memory holds them; not 0, 1, 2, ... for channels_last kernels
    owners: the modules that hold it, each with its name there; several if it is tied
    absent: what the modules hold in a step while `full` is not there: a shard would compute something else
    """

    name: str
    shard: nn.Parameter
    full: nn.Parameter
    room: Tensor
    chunk: int
    order: tuple[int, ...]
    owners: list[tuple[nn.Module, str]]
    absent: nn.Parameter

    def as_shard(self, numbers: Tensor) -> Tensor:
        """The first of these numbers as a tensor laid out like the shard; a view."""
        return lay(numbers, self.shard.shape, self.order)

    @property
    def trains(self) -> bool:
        """Whether it has a gradient."""
        return self.full.requires_grad

    def show(self, parameter: nn.Parameter) -> None:
        """Give the modules `parameter`, the full one or the shard."""
        for module, leaf in self.owners:
            module._parameters[leaf] = parameter


def make_room(
    parameter: nn.Parameter, ranks: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Parameter, Tensor]:
    """Move `parameter` into memory that holds `ranks` equal chunks, and give that memory back.

    Returns it and its room. What it held is lost: its shards must have been copied. For a parameter on the
    meta device, which cannot move, a new one.
    """
    rows = len(parameter) if parameter.dim() else 1
    chunk = chunk_rows(rows, ranks) * (parameter.numel() // max(rows, 1))
    room = torch.empty(ranks * chunk, dtype=dtype, device=device)
    # `data`: refilling the room must not look like a change of what autograd has kept.
    place = lay(room, parameter.shape, memory_order(parameter)).data
    if parameter.is_meta:
        parameter = nn.Parameter(place, requires_grad=parameter.requires_grad)
    else:
        parameter.data = place
    give_back(room)
    return parameter, room


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dims from the slowest to the fastest, where memory holds one row (dim 0) after the other without
    gaps; else as they come."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    rows = not order or (order[0] == 0 and tensor.permute(order).is_contiguous())
    return tuple(order) if rows else tuple(range(tensor.dim()))


def lay(numbers: Tensor, shape: torch.Size, order: tuple[int, ...]) -> Tensor:
    """The first of `numbers` [n] as a tensor of `shape` whose dims lie in memory in that order; a view."""
    if len(order) != len(shape):  # a number without dims, whose shard is a row of one, or of none
        return numbers[: shape.numel()].view(shape)
    back = [order.index(dim) for dim in range(len(order))]
    return numbers[: shape.numel()].view([shape[dim] for dim in order]).permute(back)


def spread_(chunks: Tensor, values: Tensor) -> None:
    """Fill `chunks` [ranks, chunk], which may be a part of wider rows, with values [n], then zeros."""
    if not chunks.numel():
        return
    whole, rest = divmod(len(values), chunks.shape[1])
    chunks[:whole].copy_(values[: whole * chunks.shape[1]].view(whole, -1))
    if whole < len(chunks):
        chunks[whole, :rest].copy_(values[len(values) - rest :])
        chunks[whole, rest:].zero_()
        chunks[whole + 1 :].zero_()
