"""Grids of ranks: a torus, or hosts with ranks inside. One axis after the other.

An all-gather along one axis gives every rank the blocks of its line; along the next axis it hands on all of
these. The traffic of an axis is what is still missing, so the order of the axes decides what the slow one
carries: the network of a hierarchy comes first in an all-gather (one block a rank) and last in a
reduce-scatter, when the inside of the host has already added up.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from fmlab.collectives.direct import direct_all_gather
from fmlab.collectives.halving import doubling_all_gather
from fmlab.collectives.rings import ring_all_gather
from fmlab.collectives.schedule import Send, Steps, then, together

Coordinates = tuple[int, ...]
Gather = Callable[[Sequence[int], Sequence[Sequence[int]]], Steps]


def coordinates(dims: Sequence[int]) -> list[Coordinates]:
    """Of each rank, row-major: the last axis moves fastest."""
    return list(product(*map(range, dims)))


def lines(dims: Sequence[int], axis: int) -> list[list[int]]:
    """The ranks of each line along an axis, in order."""
    found: dict[Coordinates, list[int]] = {}
    for rank, place in enumerate(coordinates(dims)):
        found.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
    return list(found.values())


# region grid
def grid_all_gather(
    dims: Sequence[int], order: Sequence[int], gather: Sequence[Gather], parts: int = 1, part: int = 0
) -> Steps:
    """All-gather axis by axis, in `order`, by gather[axis] along each line.

    Chunk rank * parts + part of each rank is moved: several parts can take the axes in other orders, at
    the same time.
    """
    held = {rank: [rank] for rank in range(prod(dims))}  # whose blocks each rank has
    phases = []
    for axis in order:
        along, after = [], {}
        for line in lines(dims, axis):
            blocks = [[owner * parts + part for owner in held[rank]] for rank in line]
            along.append(gather[axis](line, blocks))
            everything = sorted(owner for rank in line for owner in held[rank])
            after.update(dict.fromkeys(line, everything))
        held = after
        phases.append(together(along))
    return then(*phases)


# endregion


def torus_all_gather(dims: Sequence[int]) -> Steps:
    """All links of a torus at once: a part of each block for every axis to begin with, and both directions.

    2 * axes parts; part p begins with axis p // 2 and runs clockwise or, for odd p, the other way. On an
    axis of 2 both directions are one neighbour: still two messages.
    """
    phases = []
    for part, (order, way) in enumerate(turns(len(dims))):
        gather = [_ring_going(way)] * len(dims)
        phases.append(grid_all_gather(dims, order, gather, 2 * len(dims), part))
    return together(phases)


def turns(axes: int) -> list[tuple[list[int], int]]:
    """(order of the axes, direction) of each part that goes over a torus at the same time."""
    every = list(range(axes))
    return [(every[first:] + every[:first], way) for first in every for way in (1, -1)]


def _ring_going(way: int) -> Gather:
    return lambda line, blocks: ring_all_gather(line, blocks, way)


def hierarchical_all_gather(dims: Sequence[int], inside: str = "ring", between: str = "ring") -> Steps:
    """Between hosts first, among the ranks in the same place of each host; then inside every host.

    dims: hosts, ranks of a host; or hosts and the axes of the torus that a host is, all links of which are
    used at once. inside: "ring" or "direct", where it is no torus. between: "ring" or "halving_doubling".
    """
    ways = {"ring": ring_all_gather, "direct": direct_all_gather, "halving_doubling": doubling_all_gather}
    if len(dims) == 2:
        return grid_all_gather(dims, (0, 1), [ways[between], ways[inside]])
    phases = []
    for part, (order, way) in enumerate(turns(len(dims) - 1)):
        gather = [ways[between], *[_ring_going(way)] * (len(dims) - 1)]
        axes = [0, *(axis + 1 for axis in order)]
        phases.append(grid_all_gather(dims, axes, gather, 2 * (len(dims) - 1), part))
    return together(phases)


def grid_all_to_all(dims: Sequence[int]) -> Steps:
    """Axis by axis, the last one first: what goes to the same place of a line travels together.

    With hosts as the first axis, each pair of hosts exchanges few large messages instead of many small ones.
    """
    places = coordinates(dims)
    rank_of = {place: rank for rank, place in enumerate(places)}
    n, steps = len(places), []
    for axis in reversed(range(len(dims))):
        carried: dict[tuple[int, int], list[int]] = {}
        for s, d in product(range(n), range(n)):
            here = places[s][: axis + 1] + places[d][axis + 1 :]
            there = places[s][:axis] + places[d][axis:]
            if here != there:
                carried.setdefault((rank_of[here], rank_of[there]), []).append(s * n + d)
        steps.append([Send(a, b, tuple(chunks)) for (a, b), chunks in carried.items()])
    return steps
