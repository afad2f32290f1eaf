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
    owners: the modules that hold it, each with its name there; several if it is tied
    """

    name: str
    shard: nn.Parameter
    full: nn.Parameter
    room: Tensor
    chunk: int
    owners: list[tuple[nn.Module, str]]

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
    place = room[: parameter.numel()].view(parameter.shape).data
    if parameter.is_meta:
        parameter = nn.Parameter(place, requires_grad=parameter.requires_grad)
    else:
        parameter.data = place
    give_back(room)
    return parameter, room


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
