"""The grid of ranks with communication along its lines.

Strategies talk through an `Axis`: the ranks of one line, this rank's place among them, and collectives that
do nothing where the line is one rank long. So a strategy is written once and holds for any degree, and what
carries its messages (gloo, NCCL, our own algorithms on send and receive) is chosen in one place.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmlab import collectives
from fmlab.parallel.grid import Grid

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.13 and before
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class InFlight:
    """A message on its way here; what is sent meanwhile must not be changed before `wait`."""

    def __init__(self, arriving: Tensor, sent: Tensor, work: Sequence[Any]) -> None:
        self._arriving, self._sent, self._work = arriving, sent, work

    def wait(self) -> Tensor:
        """The message, once it is here and what was sent may be changed again."""
        for work in self._work:
            work.wait()
        return self._arriving


class Axis:
    """The ranks of one line of the mesh; `rank` is this process's place on it, not its number in the
    world."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int, group: Any, ours: bool = False) -> None:
        """ranks: numbers in the world. group: their process group. ours: use fmlab.collectives."""
        self.name, self.ranks, self.rank, self.group, self.ours = name, tuple(ranks), rank, group, ours

    @property
    def size(self) -> int:
        """How many ranks the line has."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Axis({self.name}, rank {self.rank} of {self.size}, world ranks {list(self.ranks)})"

    def all_reduce_(self, tensor: Tensor, async_op: bool = False, op: str = "sum") -> Any:
        """Combine `tensor` over the ranks in place ("sum", "max", "min"); returns it, or what to wait for."""
        if self.size == 1:
            return None if async_op else tensor
        if self.ours and not async_op:
            return collectives.all_reduce(tensor, op, self.group)
        work = dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), self.group, async_op)
        return work if async_op else tensor

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Every rank's `tensor` (of one shape), side by side along `dim`, by rank."""
        if self.size == 1:
            return tensor
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self.all_gather_into(gathered, tensor.contiguous())
        return (
            torch.cat(gathered.unbind(), dim) if dim else gathered.flatten(0, 1) if tensor.dim() else gathered
        )

    def all_gather_into(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Any:
        """Fill `output`, contiguous, with every rank's `tensor` one after the other; returns what to wait
        for."""
        if self.size == 1:
            output.view(-1).copy_(tensor.reshape(-1))
            return None
        if self.ours and not async_op:
            collectives.all_gather(output, tensor, self.group)
            return None
        return _all_gather(output.view(-1), tensor.reshape(-1), group=self.group, async_op=async_op)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's part, along `dim`, of the sum of all ranks' tensors. Raises ValueError if it is no
        even cut."""
        if self.size == 1:
            return tensor
        if tensor.shape[dim] % self.size:
            raise ValueError(f"dim {dim} of {list(tensor.shape)} cannot be cut into {self.size} equal parts")
        parts = tensor.contiguous() if dim == 0 else torch.stack(tensor.chunk(self.size, dim))
        shape = list(tensor.shape)
        shape[dim] //= self.size
        output = tensor.new_empty(shape)
        self.reduce_scatter_into(output, parts)
        return output

    def reduce_scatter_into(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Any:
        """Fill `output` with this rank's part of the sum over ranks of `tensor` (contiguous, size x as
        long)."""
        if self.size == 1:
            output.view(-1).copy_(tensor.reshape(-1))
            return None
        if self.ours and not async_op:
            collectives.reduce_scatter(output, tensor, "sum", self.group)
            return None
        return _reduce_scatter(output.view(-1), tensor.reshape(-1), group=self.group, async_op=async_op)

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> Tensor:
        """Rows of `tensor` to the ranks, in equal parts or `send[r]` to rank r; returns the rows that
        arrive."""
        if self.size == 1:
            return tensor
        rows = len(tensor) if receive is None else sum(receive)
        output = tensor.new_empty(rows, *tensor.shape[1:])
        if self.ours and send is None:
            return collectives.all_to_all(output, tensor.contiguous(), self.group)
        dist.all_to_all_single(
            output,
            tensor.contiguous(),
            None if receive is None else list(receive),
            None if send is None else list(send),
            group=self.group,
        )
        return output

    def pass_on(self, tensor: Tensor) -> InFlight:
        """Start sending `tensor` to the next rank of the ring and receiving one of its shape from the one
        before; returns at once."""
        tensor = tensor.contiguous()
        if self.size == 1 or not tensor.numel():
            return InFlight(tensor, tensor, ())
        arriving = torch.empty_like(tensor)
        after, before = (self.ranks[(self.rank + step) % self.size] for step in (1, -1))
        messages = [
            dist.P2POp(dist.isend, tensor, after, self.group),
            dist.P2POp(dist.irecv, arriving, before, self.group),
        ]
        return InFlight(arriving, tensor, dist.batch_isend_irecv(messages))

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of the rank at place `source` of the line; returns it."""
        if self.size > 1:
            dist.broadcast(tensor, self.ranks[source], group=self.group)
        return tensor

    def send(self, tensor: Tensor, to: int) -> Any:
        """Begin to send `tensor`, contiguous, to the rank at place `to`; returns what to wait for before it
        is changed."""
        return dist.isend(tensor, self.ranks[to], group=self.group)

    def receive(self, tensor: Tensor, source: int) -> Any:
        """Begin to fill `tensor`, contiguous, with the next message from place `source`; returns what to wait
        for."""
        return dist.irecv(tensor, self.ranks[source], group=self.group)

    def gather_objects(self, item: Any) -> list[Any]:
        """Every rank's `item` (anything that can be pickled), by rank."""
        if self.size == 1:
            return [item]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, item, group=self.group)
        return every


class Mesh:
    """A `Grid` seen from one rank, with a process group for each line it belongs to.

    Every rank of the world makes it, and asks for its axes in the same order: making a process group is
    itself a collective.
    """

    def __init__(self, grid: Grid, rank: int | None = None, ours: bool = False) -> None:
        """rank: this process's; default: that of the initialised world, or 0 without one. ours: see Axis."""
        world = dist.is_available() and dist.is_initialized()
        self.grid, self.ours = grid, ours
        self.rank = rank if rank is not None else dist.get_rank() if world else 0
        self.coordinates = grid.coordinates(self.rank)
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._groups: dict[tuple[Any, ...], Any] = {}

    def axis(self, *names: str) -> Axis:
        """The line through this rank along one axis, or the plane along several; kept after the first
        call."""
        if names not in self._axes:
            lines = self.grid.lines(*names)
            self._axes[names] = self._make(" x ".join(names), lines)
        return self._axes[names]

    def subset(self, name: str, places: Iterable[int]) -> Axis | None:
        """The ranks at some places of each line along `name`, such as a pipeline's first and last stage.

        None on a rank that is at none of these places; it must call all the same.
        """
        places = sorted(set(places))
        lines = [[line[place] for place in places] for line in self.grid.lines(name)]
        return self._make(f"{name}{places}", lines)

    def channel(self, name: str, purpose: str) -> Axis:
        """The line along one axis with a process group of its own, whose messages mix with no others."""
        axis: Axis = self._make(f"{name} {purpose}", self.grid.lines(name), purpose)
        return axis

    def _make(self, name: str, lines: list[list[int]], purpose: str = "") -> Any:
        mine = next((line for line in lines if self.rank in line), None)
        key = (purpose, *(tuple(line) for line in lines))
        if key not in self._groups:
            self._groups[key] = self._new_groups(lines, mine, own=bool(purpose))
        if mine is None:
            return None
        return Axis(name, mine, mine.index(self.rank), self._groups[key], self.ours)

    def _new_groups(self, lines: list[list[int]], mine: list[int] | None, own: bool = False) -> Any:
        """The group of `mine`. Every rank makes the groups of all lines, in the same order."""
        if len(lines[0]) == 1:
            return None
        if len(lines[0]) == self.grid.world_size and not own:
            return dist.group.WORLD
        found = None
        for line in lines:
            group = dist.new_group(line)
            if line is mine:
                found = group
        return found

    def close(self) -> None:
        """Give the process groups back."""
        for group in self._groups.values():
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups.clear()
        self._axes.clear()
