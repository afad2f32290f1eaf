"""How long a collective takes, modelled, on a topology or on a measured machine.

    seconds("all_reduce", 2**30, cluster("p5.48xlarge", 4))            the best algorithm
    seconds("all_reduce", 2**30, torus((4, 4), 90e9, 1e-6), "ring")    a certain one
    seconds("all_reduce", 2**30, machine("h200"))                      as fitted to measured runs

On a topology: the messages of the schedule, priced with the links that they share (`pricing`). The first call
for an algorithm on a topology takes milliseconds, the next ones microseconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from fmlab.chips.topology import Topology
from fmlab.collectives.algorithms import ALGORITHMS, BETWEEN, check_algorithm, takes_segments
from fmlab.collectives.machines import Machine
from fmlab.collectives.pricing import price

__all__ = ["Choice", "candidates", "compare", "crossover", "seconds"]

DIRECT_UP_TO = 64  # ranks: beyond, everybody to everybody is too many messages for real adapters and for us
SEGMENTS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, order=True)
class Choice:
    """An algorithm and its modelled seconds; segments, dims and between as `schedule` takes them."""

    seconds: float
    algorithm: str
    segments: int | None = None
    dims: tuple[int, ...] = ()
    between: str = ""


def seconds(
    collective: str,
    payload_bytes: float,
    network: Topology | Machine,
    algorithm: str = "auto",
    *,
    ranks: Sequence[int] | None = None,
    beside: Sequence[Sequence[int]] = (),
) -> float:
    """Modelled seconds of one collective.

    payload_bytes: of the whole logical tensor: what a gather puts together, what a reduce-scatter or an
        all-to-all takes in, on one rank.
    network: a topology, or a machine fitted to measurements (then only algorithm="auto").
    ranks: the chips that take part, in order of rank (default: all).
    beside: other groups of as many chips that do the same at the same time, and share links.

    Raises ValueError for unknown names, for a link without a latency, and for chips that do not exist.
    """
    if isinstance(network, Machine):
        if algorithm != "auto" or beside:
            raise ValueError(
                f"{network.name} is a fit to measured runs, in which the library chose the algorithm: "
                "leave algorithm and beside out, or give a topology"
            )
        return network.seconds(collective, payload_bytes, None if ranks is None else len(ranks))
    return compare(collective, payload_bytes, network, algorithm, ranks=ranks, beside=beside)[0].seconds


def compare(
    collective: str,
    payload_bytes: float,
    topology: Topology,
    algorithm: str = "auto",
    *,
    ranks: Sequence[int] | None = None,
    beside: Sequence[Sequence[int]] = (),
) -> list[Choice]:
    """Every algorithm that `candidates` names (or just the one), the fastest first."""
    if not isinstance(topology, Topology):
        raise ValueError(
            f"a collective is priced on a Topology or a Machine, not on {type(topology).__name__}; "
            "for a process group make one with fmlab.collectives.measure_links"
        )
    if not payload_bytes >= 0:
        raise ValueError(f"a payload has at least 0 bytes, not {payload_bytes}")
    chips = tuple(topology.chips if ranks is None else ranks)
    groups = [chips, *map(tuple, beside)]
    _check_groups(topology, groups)
    names = candidates(collective, topology, chips) if algorithm == "auto" else [algorithm]
    found = []
    for name in names:
        check_algorithm(collective, name)
        dims = _dims(name, topology, chips)
        pieces = _segments(collective, name, payload_bytes, topology, chips)
        levels = BETWEEN if name == "hierarchical" and collective != "all_to_all" else ("",)
        for segments, between in product(pieces, levels):
            one = price(topology, collective, name, groups, segments, dims, between)
            found.append(Choice(one.seconds(payload_bytes), name, segments, dims, between))
    return sorted(found, key=lambda choice: choice.seconds)


def candidates(collective: str, topology: Topology, ranks: Sequence[int]) -> list[str]:
    """The algorithms that "auto" chooses from on these chips."""
    if collective not in ALGORITHMS:
        check_algorithm(collective, "")
    names = list(ALGORITHMS[collective])
    names.remove("tree") if "double_tree" in names else None
    if _shape(topology, ranks) is None:
        names = [name for name in names if name != "torus"]
    if _hosts(topology, ranks) is None:
        names = [name for name in names if name != "hierarchical"]
    if len(ranks) > DIRECT_UP_TO:
        others = [name for name in names if name not in ("direct", "one_shot", "pairwise", "bruck")]
        names = others or ["direct"]
    return names


def crossover(
    collective: str,
    topology: Topology,
    small: str,
    large: str,
    *,
    ranks: Sequence[int] | None = None,
    between: tuple[float, float] = (1.0, 2.0**40),
) -> float | None:
    """The payload [bytes] from which on `large` is faster than `small`; None if one of them always is."""

    def gain(payload: float) -> float:
        return seconds(collective, payload, topology, small, ranks=ranks) - seconds(
            collective, payload, topology, large, ranks=ranks
        )

    low, high = between
    if gain(low) >= 0 or gain(high) <= 0:
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) < 0 else (low, middle)
    return high


def _segments(
    collective: str, algorithm: str, payload: float, topology: Topology, chips: Sequence[int]
) -> Sequence[int | None]:
    """How many segments to try: around what balances the latency of a step and its bytes."""
    if not takes_segments(collective, algorithm):
        return (None,)
    if len(chips) == 1:
        return (2,)
    latency = topology.latency(chips[0], chips[1])
    bandwidth = topology.bandwidth(chips[0], chips[1])
    depth = len(chips) if algorithm == "ring" else 2 * math.log2(len(chips)) + 1
    ideal = math.sqrt(depth * payload / bandwidth / max(latency, 1e-12)) if payload else 2
    few = len(chips) > DIRECT_UP_TO  # every segment costs time to price, too
    legal = SEGMENTS[:4] if few else SEGMENTS
    at = min(range(len(legal)), key=lambda i: abs(math.log(legal[i] / max(ideal, 1e-9))))
    return legal[at : at + 1] if few else legal[max(at - 1, 0) : at + 2]


def _dims(algorithm: str, topology: Topology, chips: Sequence[int]) -> tuple[int, ...]:
    if algorithm == "torus":
        shape = _shape(topology, chips)
        if shape is None:
            raise ValueError("the torus algorithm needs all chips of a torus, in order")
        return shape
    if algorithm == "hierarchical":
        hosts = _hosts(topology, chips)
        if hosts is None:
            raise ValueError(
                "hierarchical needs chips of several hosts, as many of each, those of a host together"
            )
        return hosts
    return ()


def _shape(topology: Topology, chips: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a torus if these chips are all of one, in order."""
    shape: tuple[int, ...] | None = getattr(topology.rule, "shape", None)
    if shape is None or tuple(chips) != tuple(topology.chips):
        return None
    return tuple(dim for dim in shape if dim > 1) or None


def _hosts(topology: Topology, chips: Sequence[int]) -> tuple[int, ...] | None:
    """(groups, chips of each) if these chips are as many of each of several groups, group by group.

    A group is what the chips' own links join: a host, an UltraServer, a slice. Where all chips take part and
    a group is a torus: (groups, its axes).
    """
    order = [_group_of(topology, chip) for chip in chips]
    groups = len(set(order))
    if groups < 2 or groups == len(chips) or len(chips) % groups:
        return None
    local = len(chips) // groups
    if any(len(set(order[at : at + local])) > 1 for at in range(0, len(chips), local)):
        return None
    shape = getattr(getattr(topology.rule, "inside", None), "shape", ())
    axes = tuple(dim for dim in shape if dim > 1)
    return (groups, *axes) if len(axes) > 1 and len(chips) == len(topology.chips) else (groups, local)


def _group_of(topology: Topology, chip: int) -> int:
    size = getattr(topology.rule, "group", None) or len(topology.hosts[0])
    return chip // int(size)


def _check_groups(topology: Topology, groups: Sequence[Sequence[int]]) -> None:
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise ValueError(f"groups that run beside each other have the same size, not {sorted(sizes)}")
    for group in groups:
        if not group or len(set(group)) != len(group) or not set(group) <= set(topology.chips):
            raise ValueError(
                f"ranks must be different chips of the {len(topology.chips)} there are, not {list(group)[:8]}"
            )
