"""The links of the ranks at hand, measured: a topology to price collectives on."""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from fmlab.chips.topology import Topology, switch

LARGE = 4 << 20  # bytes


def measure_links(group: Any = None, repeats: int = 20) -> Topology:
    """A switch with the latency and bandwidth of ring neighbours of this group, all at once (measured).

    Every rank of the group calls it, and all get the same figures: the median over `repeats` exchanges of one
    byte and of 4 MiB, on the slowest rank. What all ranks share (the cores of one machine) is in it, so it
    describes collectives of this group, not one message alone. ValueError for a group of one rank.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if n < 2:
        raise ValueError(f"links join at least 2 ranks; this group has {n}")
    small = _exchange_seconds(1, rank, n, group, repeats)
    large = _exchange_seconds(LARGE, rank, n, group, max(repeats // 4, 3))
    slowest = torch.tensor([small, max(large - small, 1e-9)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    latency, transfer = slowest.tolist()
    return switch(n, LARGE / transfer, latency)


def _exchange_seconds(size: int, rank: int, n: int, group: Any, repeats: int) -> float:
    """Median seconds of a step of a ring: send to the right, receive from the left."""
    out, room = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier(group)
        start = time.perf_counter()
        receiving: Any = dist.irecv(room, group=group, group_src=(rank - 1) % n)
        sending: Any = dist.isend(out, group=group, group_dst=(rank + 1) % n)
        receiving.wait()
        sending.wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first opens the connection
