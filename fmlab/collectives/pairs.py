"""The link between every two ranks, each measured alone, and whose links are slow."""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

Pair = tuple[int, int]
SLOW = 0.5  # of the median of the ranks: what less is called slow


def measure_pairs(size: int = 4 << 20, group: Any = None, repeats: int = 3) -> dict[Pair, float]:
    """Bytes a second, each way at once, between ranks a < b of this group (measured).

    Every rank of the group calls it, and all get the same figures: of each pair the best of `repeats`
    exchanges of `size` bytes. In every round a rank exchanges with one other only; ranks that share a host's
    network share it here, too. ValueError for a group of one rank.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if n < 2:
        raise ValueError(f"links join at least 2 ranks; this group has {n}")
    out, room = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    found = torch.zeros(n, n, dtype=torch.float64)
    for pairs in rounds(n):
        other = next((sum(pair) - rank for pair in pairs if rank in pair), None)
        for _ in range(repeats + 1):  # the first opens the connection
            dist.barrier(group)
            if other is not None:
                start = time.perf_counter()
                receiving: Any = dist.irecv(room, group=group, group_src=other)
                sending: Any = dist.isend(out, group=group, group_dst=other)
                receiving.wait()
                sending.wait()
                rate = size / (time.perf_counter() - start)
                found[rank, other] = max(float(found[rank, other]), rate)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    # what the slower end saw: the other may have had its bytes on the way before it began to count
    return {(a, b): float(min(found[a, b], found[b, a])) for a in range(n) for b in range(a + 1, n)}


def rounds(n: int) -> Iterator[list[Pair]]:
    """Every pair of n once, in rounds in which each is in one pair at most: the circle of a tournament."""
    seats: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    for _ in range(len(seats) - 1):
        ends = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in ends if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def slow_ranks(rates: Mapping[Pair, float]) -> list[int]:
    """The ranks whose best link is slower than half of the median rank's best. Of two ranks there is none: a
    slow link does not tell which end is to blame."""
    best: dict[int, float] = {}
    for pair, rate in rates.items():
        for rank in pair:
            best[rank] = max(best.get(rank, 0.0), rate)
    median = statistics.median(best.values())
    return [rank for rank, rate in sorted(best.items()) if rate < SLOW * median]
