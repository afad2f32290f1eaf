"""Collectives by hand against gloo, on four real ranks of this machine.

The same sizes, alternately, in the same processes; a call has ended when it has on every rank. The ranks
share the cores, so the ratio is the result, not the seconds.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fmlab.bench import Ratio, Result
from fmlab.collectives import all_reduce, bus_factor, cost, measure_links, reduce_scatter, schedule
from fmlab.meter import wire
from fmlab.ranks import Ranks

RANKS = 4
PAYLOAD = 64 << 20  # bytes


def run(quick: bool = False) -> list[Result]:
    """All-reduce of 64 MB and of 4 KB beside gloo's, bytes on the wire, and how far off our model is."""
    pairs = 6 if quick else 16
    with Ranks(RANKS, timeout=600) as ranks:
        large = ranks.run(measure, PAYLOAD, "ring", pairs)
        small = ranks.run(measure, 4096, "halving_doubling", 20 * pairs)
        sent = ranks.run(wire_bytes, PAYLOAD)
        modelled = ranks.run(modelled_seconds, PAYLOAD)[0]
    fast, slow = _ratio(large), _ratio(small)
    results = [
        Result(
            "all-reduce of 64 MB by hand (ring) against gloo", fast.median, "x", ">= 0.8", detail=_rate(fast)
        ),
        Result("  of 4 KB, halving and doubling", slow.median, "x", detail=str(slow)),
        Result(
            "  the 64 MB as modelled from measured links",
            modelled / fast.seconds_a,
            "x of measured",
            kind="modelled",
            detail="latency and bandwidth of neighbours, all at once",
        ),
    ]
    if sent[0][0] is not None:
        predicted = schedule("reduce_scatter", "ring", RANKS).sent_by(PAYLOAD)[0]
        detail = f"by hand {sent[0][0]:,}, gloo {sent[0][1]:,}, schedule {predicted:,} bytes a rank"
        name = "bytes on the wire of a 64 MB reduce-scatter"
        results.append(Result(name, sent[0][0] / predicted, "x", "<= 1.01", detail=detail))
    return results


def _ratio(sides: list[tuple[list[float], list[float]]]) -> Ratio:
    ours, theirs = ([max(one) for one in zip(*(s[k] for s in sides), strict=True)] for k in (0, 1))
    return Ratio.of(ours, theirs)


def _rate(ratio: Ratio) -> str:
    bus = bus_factor("all_reduce", RANKS) * PAYLOAD / ratio.seconds_a / 1e9
    return f"ring; {ratio}; bus bandwidth {bus:.2f} GB/s"


def measure(payload: int, algorithm: str, pairs: int) -> tuple[list[float], list[float]]:
    """One rank's seconds: by hand, and by gloo."""
    tensors = [torch.zeros(payload // 4) for _ in range(2)]
    sides: list[Callable[[], Any]] = [
        lambda: all_reduce(tensors[0], algorithm=algorithm),
        lambda: dist.all_reduce(tensors[1]),
    ]
    seconds: list[list[float]] = [[], []]
    for pair in range(-2, pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            sides[which]()
            if pair >= 0:
                seconds[which].append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def wire_bytes(payload: int) -> tuple[int | None, int | None]:
    """Bytes that this rank sends in a reduce-scatter: by hand, and by gloo."""
    whole, block = torch.ones(payload // 4), torch.ones(payload // 4 // RANKS)
    found = []
    for call in (
        lambda: reduce_scatter(block, whole, algorithm="ring"),
        lambda: dist.reduce_scatter(block, list(whole.chunk(RANKS))),
    ):
        dist.barrier()
        with wire(required=False) as line:
            call()
            dist.barrier()
        found.append(line.sent)
    return found[0], found[1]


def modelled_seconds(payload: int) -> float:
    """A ring all-reduce on the links of these ranks, as measured just now."""
    return cost.seconds("all_reduce", payload, measure_links(), "ring")
