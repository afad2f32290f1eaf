"""A slow rank, named while the run goes on: how long each rank kept the others waiting in collectives.

Every few steps the ranks exchange when they entered their last collectives (their flight recorders know). A
rank that the others waited for, over more than a share of the time and three looks running, is told of.

Stages of a pipeline wait for each other by design. There what counts is how much longer a rank keeps the
others than it did at the start of the run.
"""

import socket
import time
from statistics import median
from typing import Any

import torch.distributed as dist

from fmlab.meter import Dump, FlightEntry, FlightRecorder, Stragglers, stragglers
from fmlab.parallel import state

EVERY = 10  # steps between looks
_RUNNING = 3  # looks in which a rank must be late, one after the other
_AGAIN = 10  # looks until the same rank is told of again
_ROUNDS = 5  # in which clocks of several hosts are compared


class StragglerWatch:
    """Names slow ranks; one on each rank of `group`, all call it after every step."""

    def __init__(self, flight: FlightRecorder, share: float, group: Any, by_design: bool = False) -> None:
        """share: of the time, from which on a rank is slow. by_design: ranks wait for each other anyway."""
        self.flight, self.share, self.group, self.by_design = flight, share, group, by_design
        self.found: Stragglers | None = None
        self._steps = 0
        self._late: dict[int, int] = {}  # rank -> looks in which it was late, one after the other
        self._usual: dict[int, float] = {}
        self._since = time.time()
        self._offsets: dict[int, float] | None = None

    def step(self) -> str:
        """After a step: what is to be told of a slow rank; "" for nothing, and between looks."""
        self._steps += 1
        if self._steps % EVERY:
            return ""
        self.found = self._look()
        shares = {row.rank: row.kept / self.found.seconds for row in self.found.rows if self.found.seconds}
        if self.by_design and not self._usual:
            self._usual = shares
        late = {rank for rank, one in shares.items() if one - self._usual.get(rank, 0.0) > self.share}
        self._late = {rank: self._late.get(rank, 0) + 1 for rank in late}
        told = [rank for rank in sorted(late) if self._late[rank] % _AGAIN == _RUNNING]
        return "; ".join(self._sentence(rank, shares[rank]) for rank in told)

    def _sentence(self, rank: int, share: float) -> str:
        assert self.found is not None
        row = next(row for row in self.found.rows if row.rank == rank)
        return (
            f"rank {rank} keeps the others waiting {share:.0%} of the time, longest before "
            f"{row.call.partition(' #')[0]} by {row.latest * 1e3:.1f} ms"
        )

    def _look(self) -> Stragglers:
        since, self._since = self._since, time.time()
        entries = [entry for entry in self.flight.entries(lines=False) if entry.issued >= since]
        mine = [(e.group, e.number, e.op, e.ranks, e.issued) for e in entries if not e.is_message]
        every = state.gather(mine, self.group)
        if self._offsets is None:
            self._offsets = self._clocks()
        dumps = [
            Dump(
                rank, len(every), [FlightEntry(g, n, op, "", (), 0, r, at, True) for g, n, op, r, at in each]
            )
            for rank, each in enumerate(every)
        ]
        return stragglers(dumps, self._offsets)

    def _clocks(self) -> dict[int, float]:
        """Seconds that each rank's clock is ahead of the first one's: by when all leave a barrier."""
        hosts = state.gather(_boot(), self.group)
        if len(set(hosts)) == 1:
            return {}
        rounds = []
        for _ in range(_ROUNDS):
            dist.barrier(group=self.group)
            rounds.append(state.gather(time.time(), self.group))
        return {rank: median(each[rank] - each[0] for each in rounds) for rank in range(len(hosts))}


def _boot() -> str:
    """What tells this host from others: the kernel's number of its last start."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return socket.gethostname()
