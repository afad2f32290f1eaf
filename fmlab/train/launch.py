"""One process or many: the same training in a script, under torchrun and inside Ranks."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fmlab.backends import Backend
from fmlab.parallel.ddp.replicas import run_on_first
from fmlab.train.meeting import lends_its_store, meet
from fmlab.train.roll import Roll, call_roll, naming, several_hosts


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks, or among some of them.

    group: their process group, if they are not all there are. roll: on which host each is, if a launcher has
    started them on several.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    roll: Roll | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def on_first(self, action: Callable[[], None]) -> None:
        """Run `action` on the first rank; all wait for it and raise what it raised."""
        if self.size == 1:
            action()
        else:
            run_on_first(action, self.group or dist.group.WORLD)

    def sum(self, values: Tensor) -> Tensor:
        """`values` added up over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values


@contextmanager
def world_of(backend: Backend, folder: str | None = None) -> Iterator[World]:
    """The ranks of this run: a process group that exists (as in Ranks), one that torchrun asks for, or none.

    A group that is made here is ended here. folder: the run's, where ranks of several hosts find each other.
    """
    if dist.is_available() and dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size())
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        options = backend.distributed_options()
        if lends_its_store() and "init_method" not in options:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            options |= {"store": meet(rank, size, folder), "rank": rank, "world_size": size}
        dist.init_process_group(backend.distributed_backend, **options)
        try:
            roll = _roll() if several_hosts() else None
            with naming(roll):
                yield World(dist.get_rank(), dist.get_world_size(), roll=roll)
        finally:
            dist.destroy_process_group()
    else:
        yield World()


def _roll() -> Roll:
    store = dist.distributed_c10d._get_default_store()
    return call_roll(store, dist.get_rank(), dist.get_world_size())


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of a step's dropout; made from seed, step and rank, so that resuming needs no saved state."""
    return ((seed * 1_000_003 + step) * 1_000_003 + rank) % (1 << 63)
