"""A schedule on real ranks, over isend and irecv: the same steps, now with numbers instead of sets.

Every rank walks through the steps and does what concerns it: post the receives, post the sends, add each
piece when it has arrived while the next is still on its way, and go on. Messages are cut into pieces, so that
the addition of one overlaps the transfer of the next, and they land where they stay: only what must be added
goes through a scratch buffer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fmlab.collectives.schedule import Schedule, Send, Step, runs

PIECE_BYTES = (
    1 << 20
)  # large enough that a message costs little, small enough to overlap and to stay in a cache
_TAG = 7040  # of our messages: apart from those that the user sends

Combine = Callable[[Tensor, Tensor], Any]  # in place, into the first

COMBINE: dict[str, Combine] = {
    "sum": lambda own, other: own.add_(other),
    "avg": lambda own, other: own.add_(other),  # divided once, at the end
    "max": lambda own, other: torch.maximum(own, other, out=own),
    "min": lambda own, other: torch.minimum(own, other, out=own),
}


class Memory(Protocol):
    """Where a rank keeps its chunks."""

    def pieces(self, chunks: tuple[int, ...]) -> Iterator[Tensor]:
        """The memory of these chunks, in pieces whose sizes are the same on every rank."""


class Flat:
    """All chunks side by side in one tensor: the payload itself."""

    def __init__(self, flat: Tensor, sizes: list[int]) -> None:
        self.flat, self.starts = flat, [0]
        for size in sizes:
            self.starts.append(self.starts[-1] + size)

    def pieces(self, chunks: tuple[int, ...]) -> Iterator[Tensor]:
        for first, last in runs(chunks):
            yield from cut(self.flat[self.starts[first] : self.starts[last]])


class Blocks:
    """All-to-all: blocks of the input to send, blocks of the output to fill, room for what is relayed."""

    def __init__(self, output: Tensor, source: Tensor, rank: int, n: int) -> None:
        self.block = source.numel() // n
        self.output, self.rank, self.n = output, rank, n
        self.held = {rank * n + d: source[d * self.block : (d + 1) * self.block] for d in range(n)}
        output[rank * self.block : (rank + 1) * self.block].copy_(self.held[rank * n + rank])

    def pieces(self, chunks: tuple[int, ...]) -> Iterator[Tensor]:
        for chunk in chunks:
            if chunk not in self.held:
                origin, destination = divmod(chunk, self.n)
                room = self.output[origin * self.block : (origin + 1) * self.block]
                self.held[chunk] = room if destination == self.rank else torch.empty_like(room)
            yield from cut(self.held[chunk])


def cut(run: Tensor) -> Iterator[Tensor]:
    """Pieces of at most PIECE_BYTES; nothing for an empty run."""
    if run.numel():
        yield from run.split(max(PIECE_BYTES // run.element_size(), 1))


@dataclass
class _Arrival:
    """A piece on its way to this rank: `room` is where it lands, `own` what it is added to or replaces."""

    work: Any
    room: Tensor
    own: Tensor
    reduce: bool


def execute(plan: Schedule, memory: Memory, group: Any, combine: Combine) -> None:
    """This rank's part of a schedule. Every rank of the group runs the same one."""
    rank = dist.get_rank(group)
    scratch = _Scratch()
    for step in plan.steps:
        run_step(step, rank, memory, group, combine, scratch)


# region step
def run_step(
    step: Step, rank: int, memory: Memory, group: Any, combine: Combine, scratch: "_Scratch"
) -> None:
    """One step of one rank: all its messages leave with what it held before."""
    sent = {chunk for send in step if send.source == rank for chunk in send.chunks}
    arrivals: list[_Arrival] = []
    sends: list[Any] = []
    scratch.restart()
    for send in step:
        if send.destination == rank:
            aside = send.reduce or not sent.isdisjoint(send.chunks)
            arrivals += _receive(send, memory, group, scratch if aside else None)
    for send in step:
        if send.source == rank:
            for piece in memory.pieces(send.chunks):
                sends.append(dist.isend(piece, group=group, group_dst=send.destination, tag=_TAG))
    if any(not sent.isdisjoint(send.chunks) for send in step if send.destination == rank):
        _wait(sends)  # what leaves must not be changed before it has left
    for arrival in arrivals:
        arrival.work.wait()
        if arrival.reduce:
            combine(arrival.own, arrival.room)
        elif arrival.room is not arrival.own:
            arrival.own.copy_(arrival.room)
    _wait(sends)


# endregion


def _receive(send: Send, memory: Memory, group: Any, scratch: "_Scratch | None") -> Iterator[_Arrival]:
    for own in memory.pieces(send.chunks):
        room = own if scratch is None else scratch.like(own)
        work = dist.irecv(room, group=group, group_src=send.source, tag=_TAG)
        yield _Arrival(work, room, own, send.reduce)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()


class _Scratch:
    """Buffers that are used again in every step."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.used = 0

    def restart(self) -> None:
        self.used = 0

    def like(self, piece: Tensor) -> Tensor:
        """A buffer of the shape of `piece`, free until the next restart."""
        if self.used == len(self.buffers):
            self.buffers.append(torch.empty_like(piece))
        elif self.buffers[self.used].numel() < piece.numel():
            self.buffers[self.used] = torch.empty_like(piece)
        found = self.buffers[self.used][: piece.numel()]
        self.used += 1
        return found
