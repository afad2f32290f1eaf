"""What a unit sends: its parameters in one all-gather, its gradients in one reduce-scatter.

A rank's message is its chunk of every parameter, one after the other:

    all-gather      in: [chunk of a | chunk of b]      out: [ranks, chunk of a | chunk of b]
    reduce-scatter  in: [ranks, chunk of a | chunk of b]   out: [chunk of a | chunk of b], summed

Chunks of one parameter do not lie one below the other in what arrives, so they are copied to where they do:
the price of dividing parameter by parameter, instead of all of a unit's as one row of numbers (as FSDP did
before it was FSDP2), which no optimizer and no checkpoint could read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmlab.parallel.fsdp.memory import give_back, take_again
from fmlab.parallel.fsdp.record import Event, Kind, Record
from fmlab.parallel.fsdp.sharded import Sharded, spread_
from fmlab.parallel.mesh import Axis


@dataclass
class _Arrival:
    """A message under way: what to wait for, what arrives, and what must live until then."""

    work: Any
    tensor: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Group:
    """Those parameters of a unit that are divided among the same ranks and have the same element type.

    axis:   the ranks that divide them
    copies: the ranks whose gradients belong to the same sum, beside those of `axis`
    """

    def __init__(self, axis: Axis, copies: Axis, parameters: list[Sharded]) -> None:
        self.axis, self.copies = axis, copies
        # Wider element types first, so that in bytes each begins where its type may.
        self.parameters = sorted(parameters, key=lambda p: -p.room.element_size())
        self.trained = [p for p in self.parameters if p.trains]
        kinds = {p.room.dtype for p in self.parameters}
        self.message_dtype = kinds.pop() if len(kinds) == 1 else torch.uint8
        self.in_pass = False  # whether a missing parameter must be missed
        self.used: set[str] = set()  # parameters that had a gradient on this rank in this step
        self._arriving: _Arrival | None = None
        self._summing: _Arrival | None = None
        self.sums: Tensor | None = None  # of this step's gradients, this rank's chunks
        self._master = self._one_memory()

    def _one_memory(self) -> Tensor:
        """Move all shards, one after the other, into one tensor, which is then sent as it is."""
        kind = self.parameters[0].shard.dtype
        device = self.parameters[0].shard.device
        memory = torch.zeros(sum(p.chunk for p in self.parameters), dtype=kind, device=device)
        for p, place in zip(self.parameters, memory.split([p.chunk for p in self.parameters]), strict=True):
            p.shard.data = p.as_shard(place).copy_(p.shard.data)
        return memory

    # region gather
    @torch.no_grad()
    def start_gather(self) -> None:
        """Send this rank's chunks; the others' arrive while the host goes on."""
        mine = self._message()
        gathered = mine.new_empty(self.axis.size, len(mine))
        work = self.axis.all_gather_into(gathered, mine, async_op=not self.axis.ours)
        self._arriving = _Arrival(work, gathered, mine)

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Wait for all chunks and put those of each parameter one below the other."""
        assert self._arriving is not None
        gathered, mine = self._arriving.wait(), self._arriving.sent
        self._arriving = None
        if mine is not self._master:
            give_back(mine)
        start = 0
        for p in self.parameters:
            width = p.chunk * p.room.element_size() // gathered.element_size()
            chunks = gathered[:, start : start + width].view(p.room.dtype)
            take_again(p.room)
            p.room.view(self.axis.size, p.chunk).copy_(chunks)
            p.show(p.full)
            start += width
        give_back(gathered)  # now: a thread of the collective may hold it a moment longer

    # endregion

    def _message(self) -> Tensor:
        """This rank's chunks in the element types in which they are gathered."""
        if self.message_dtype == self._master.dtype:
            return self._master
        chunks = self._master.split([p.chunk for p in self.parameters])
        sizes = [p.chunk * p.room.element_size() // self.message_dtype.itemsize for p in self.parameters]
        message = self._master.new_empty(sum(sizes), dtype=self.message_dtype)
        for p, chunk, place in zip(self.parameters, chunks, message.split(sizes), strict=True):
            place.view(p.room.dtype).copy_(chunk)
        return message

    def free(self) -> None:
        """Give the gathered parameters back; the modules hold shards again, or in a pass nothing to read."""
        with torch.no_grad():
            for p in self.parameters:
                give_back(p.room)
        self.show_rest()

    def show_rest(self) -> None:
        """Let the modules see what is there between two gathers."""
        for p in self.parameters:
            p.show(p.absent if self.in_pass else p.shard)

    # region reduce
    @torch.no_grad()
    def start_reduce(self) -> None:
        """Send the gradients that this rank's backward pass has made; each rank gets the sum of its chunks.

        They are summed in the element type of the shards. A parameter without a gradient adds zeros.
        """
        if not self.trained:
            return
        self.settle()  # one message of gradients at a time
        chunk = [p.chunk for p in self.trained]
        mine = self._master.new_empty(self.axis.size, sum(chunk))
        for p, chunks in zip(self.trained, mine.split(chunk, dim=1), strict=True):
            if p.full.grad is None:
                chunks.zero_()
                continue
            self.used.add(p.name)
            spread_(chunks, p.full.grad.permute(p.order).reshape(-1))
            p.full.grad = None
        summed = mine.new_empty(sum(chunk))
        work = self.axis.reduce_scatter_into(summed, mine, async_op=not self.axis.ours)
        self._summing = _Arrival(work, summed, mine)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the gradients under way and add them to those of earlier micro-batches."""
        if self._summing is None:
            return
        summed = self._summing.wait()
        give_back(self._summing.sent)
        self._summing = None
        self.sums = summed if self.sums is None else self.sums.add_(summed)

    def start_replicas(self) -> Any:
        """Add up the sums over the copies of these shards; returns what to wait for."""
        if self.sums is None or self.copies.size == 1:
            return None
        work = self.copies.all_reduce_(self.sums, async_op=not self.copies.ours)
        return None if self.copies.ours else work

    # endregion

    def give_gradients(self) -> None:
        """Let the sums be the gradients of the shards."""
        if self.sums is None:
            return
        chunk = [p.chunk for p in self.trained]
        for p, sums in zip(self.trained, self.sums.split(chunk), strict=True):
            p.shard.grad = p.as_shard(sums)

    def forget(self) -> None:
        """A step begins: no gradient is there, and none is under way."""
        self.sums = self._summing = None
        self.used.clear()
        for p in self.trained:
            p.full.grad = p.shard.grad = None


class Unit:
    """Parameters that come and go together: a block's, or what no single block owns."""

    def __init__(self, name: str, index: int, groups: list[Group]) -> None:
        self.name, self.index, self.groups = name, index, groups
        self.gathered = False
        self._arriving = False
        self.in_backward = 0  # calls of the unit whose backward pass has begun and not ended
        self.keep = False  # do not give back
        self.record: Record | None = None  # of what happens in a step, if anybody wants it
        self.agree: Callable[[str], None] | None = None  # tells the other ranks what comes next

    @property
    def parameters(self) -> list[Sharded]:
        """All of them, of whatever axis."""
        return [p for group in self.groups for p in group.parameters]

    def enter_pass(self, in_pass: bool) -> None:
        """Begin, or end, to refuse uses of parameters that are not gathered."""
        for group in self.groups:
            group.in_pass = in_pass
            if not self.gathered:
                group.show_rest()

    def expect(self) -> None:
        """Start gathering, if that has not begun."""
        if not (self.gathered or self._arriving):
            if self.agree is not None:
                self.agree(f"gathers {self.name!r}")
            for group in self.groups:
                group.start_gather()
            self._arriving = True
            self._note("asked")

    def gather(self) -> None:
        """Have the parameters."""
        if not self.gathered:
            self.expect()
            for group in self.groups:
                group.finish_gather()
            self.gathered, self._arriving = True, False
            self._note("here")

    def free(self) -> None:
        """Give the gathered parameters back, unless told to keep them."""
        if self._arriving:  # nobody came for them
            self.gather()
        if self.gathered and not self.keep:
            for group in self.groups:
                group.free()
            self.gathered = False
            self._note("given back")

    def reduce(self) -> None:
        """Send the gradients on their way."""
        if self.agree is not None:
            self.agree(f"sums the gradients of {self.name!r}")
        for group in self.groups:
            group.start_reduce()
        self._note("gradients sent")

    def _note(self, kind: Kind) -> None:
        if self.record is not None:
            self.record.events.append(Event(kind, self.name, time.perf_counter()))
