"""What a schedule costs on a topology, with every link that its messages share.

Modelled: all messages of a step start together. A message takes the latency of its way, then its bytes at the
rate that the busiest link on its way leaves: that link carries all messages of the step that cross it, one
after the other. A step ends with its slowest message, and the next begins.

    seconds(step) = max over messages of (latency of the way + max over its links of (load / bandwidth))

What the model leaves out: time to add up, the processors' work for each message, ranks that run ahead.
"""

import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fmlab.chips.topology import Topology
from fmlab.collectives.patterns import Pattern, of_schedule, patterns
from fmlab.collectives.schedule import Schedule, Step


@dataclass(frozen=True)
class Price:
    """Seconds as a function of the payload: for each kind of step, its count and its lines.

    steps: (count, ((latency [s], seconds a byte of payload), ...)): a step takes the most of its lines.
    """

    steps: tuple[tuple[int, tuple[tuple[float, float], ...]], ...]

    def seconds(self, payload: float) -> float:
        """Modelled seconds for a payload of so many bytes."""
        return sum(
            count * max(latency + payload * slope for latency, slope in lines) for count, lines in self.steps
        )

    @property
    def latency(self) -> float:
        """Seconds with nothing to send."""
        return self.seconds(0)


def price_schedule(plan: Schedule, topology: Topology, ranks: Sequence[int] | None = None) -> Price:
    """The price of a schedule, message by message; rank i of the schedule is chip ranks[i]."""
    return price_patterns(of_schedule(plan), topology, [_chips(topology, ranks, plan.n)])


def price_patterns(steps: Iterable[Pattern], topology: Topology, groups: Sequence[Sequence[int]]) -> Price:
    """The price of patterns that run at the same time in some groups of chips, all of the same size."""
    return Price(tuple((one.count, _lines(one, topology, groups)) for one in steps if one.messages))


# region lines
def _lines(pattern: Pattern, topology: Topology, groups: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """What can end a step: (latency, seconds a byte of payload) of its messages, dominated ones left out."""
    ways = []
    load: defaultdict[Hashable, float] = defaultdict(float)  # link -> share of the payload
    for chips in groups:
        for (a, b), size in pattern.messages:
            way = _way(topology, chips[a], chips[b])
            ways.append(way)
            for link in way[1]:
                load[link] += size
    slope = {link: share / topology.links[link].bandwidth for link, share in load.items()}  # type: ignore[index]
    found = {(latency, max(slope[link] for link in links)) for latency, links in ways}
    return tuple(_upper(found))


# endregion


def _upper(lines: set[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those lines that are not below another one for every payload."""
    kept: list[tuple[float, float]] = []
    for latency, slope in sorted(lines, reverse=True):
        if not kept or slope > kept[-1][1]:
            kept.append((latency, slope))
    return kept


class _Memory:
    """What was computed for a topology, for as long as it lives (a topology cannot be a key of a dict)."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[Hashable, Any]] = {}

    def of(self, topology: Topology) -> dict[Hashable, Any]:
        key = id(topology)
        if key not in self.kept:
            self.kept[key] = {}
            weakref.finalize(topology, self.kept.pop, key, None)
        return self.kept[key]


_WAYS, _PRICES = _Memory(), _Memory()


def _way(topology: Topology, a: int, b: int) -> tuple[float, list[Hashable]]:
    ways = _WAYS.of(topology)
    if (a, b) not in ways:
        ways[a, b] = (topology.latency(a, b), topology.route(a, b))
    way: tuple[float, list[Hashable]] = ways[a, b]
    return way


def price(
    topology: Topology,
    collective: str,
    algorithm: str,
    groups: Sequence[Sequence[int]],
    segments: int | None = None,
    dims: tuple[int, ...] = (),
    between: str = "ring",
) -> Price:
    """The price of an algorithm in groups of chips at once; computed once for each topology."""
    key = (collective, algorithm, tuple(map(tuple, groups)), segments, dims, between)
    known = _PRICES.of(topology)
    if key not in known:
        steps = patterns(collective, algorithm, len(groups[0]), segments, dims, between)
        known[key] = price_patterns(steps, topology, groups)
    found: Price = known[key]
    return found


def link_loads(
    plan: Schedule,
    topology: Topology,
    payload: int,
    step: Step | None = None,
    ranks: Sequence[int] | None = None,
) -> dict[tuple[Hashable, Hashable], float]:
    """Bytes on each physical link of `topology`: in one step of the schedule, or in all of them."""
    chips, sizes = _chips(topology, ranks, plan.n), plan.chunk_sizes(payload)
    load: defaultdict[tuple[Hashable, Hashable], float] = defaultdict(float)
    for send in plan if step is None else step:
        for link in topology.route(chips[send.source], chips[send.destination]):
            load[link] += sum(sizes[chunk] for chunk in send.chunks)
    return dict(load)


def _chips(topology: Topology, ranks: Sequence[int] | None, n: int) -> Sequence[int]:
    chips = list(topology.chips[:n]) if ranks is None else list(ranks)
    if len(chips) != n or len(set(chips)) != n:
        raise ValueError(
            f"the schedule has {n} ranks; give as many different chips, not {len(set(chips))} "
            f"of {len(topology.chips)}"
        )
    return chips
