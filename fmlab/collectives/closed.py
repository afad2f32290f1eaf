"""Formulas: steps and volume of each algorithm, for a network in which no two messages share a link.

    seconds = steps x latency + volume x payload / bandwidth

Every pair of ranks has a link of its own with this latency and bandwidth (a full mesh). Switched networks are
the same for algorithms in which a rank sends one message at a time (ring, halving_doubling, pairwise, chain).
The formulas stand beside the priced schedules, and tests hold the two together.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil, log2, prod

from fmlab.collectives.algorithms import DEFAULT_SEGMENTS, check_algorithm, square_dims
from fmlab.collectives.trees import binary_tree, depths


@dataclass(frozen=True)
class Closed:
    """steps: messages that must wait for one another. volume: bytes on the critical way / payload."""

    steps: int
    volume: float

    def seconds(self, payload: float, latency: float, bandwidth: float) -> float:
        """payload [bytes], latency [s a message], bandwidth [bytes/s, one way]."""
        return self.steps * latency + self.volume * payload / bandwidth


# region closed
def closed_form(
    collective: str, algorithm: str, n: int, segments: int = DEFAULT_SEGMENTS, dims: tuple[int, ...] = ()
) -> Closed:
    """Steps and volume of `schedule(collective, algorithm, n)` on a full mesh; ValueError for unknown names.

    For double_tree it holds from 5 ranks on: the two trees of fewer ranks share links.
    """
    check_algorithm(collective, algorithm)
    if n == 1:
        return Closed(0, 0.0)
    if collective in ("broadcast", "reduce"):
        return _rooted(algorithm, n, segments)
    if collective == "all_to_all":
        return _all_to_all(algorithm, n, dims)
    if collective == "barrier":
        height = _height(n)
        return Closed({"dissemination": ceil(log2(n)), "tree": 2 * height, "ring": 2 * (n - 1)}[algorithm], 0)
    passes = 2 if collective == "all_reduce" else 1  # an all-reduce is a reduce-scatter and an all-gather
    if algorithm == "ring":
        return Closed(passes * (n - 1), passes * (n - 1) / n)
    if algorithm == "bidirectional_ring":
        return Closed(passes * (n - 1), passes * (n - 1) / n / (2 if n > 2 else 1))
    if algorithm == "halving_doubling":
        return Closed(passes * ceil(log2(n)), passes * (n - 1) / n)
    if algorithm == "direct":
        return Closed(passes, passes / n)
    if algorithm == "hierarchical":  # rings between hosts, then a ring or a torus inside
        hosts, local = dims[0], prod(dims[1:])
        inside = [1 / local] * (local - 1) if len(dims) == 2 else _torus_volumes(dims[1:])
        return Closed(passes * (hosts - 1 + len(inside)), passes * ((hosts - 1) / n + sum(inside)))
    if algorithm == "torus":
        volumes = _torus_volumes(dims or square_dims(n))
        return Closed(passes * len(volumes), passes * sum(volumes))
    if algorithm == "one_shot":
        return Closed(1, 1.0)
    in_flight = segments if algorithm == "tree" else segments // 2
    steps = in_flight + 2 * _height(n) - 1  # up and down, one segment behind the other
    return Closed(steps, steps / segments)


# endregion


def _height(n: int) -> int:
    return max(depths(binary_tree(n)).values())


def _rooted(algorithm: str, n: int, segments: int) -> Closed:
    if algorithm == "direct":
        return Closed(1, 1.0)
    steps = {
        "ring": lambda: segments + n - 2,
        "tree": lambda: segments + _height(n) - 1,
        "double_tree": lambda: segments // 2 + max(_height(n - 1), 0),
    }[algorithm]()
    return Closed(steps, steps / segments)


def _all_to_all(algorithm: str, n: int, dims: tuple[int, ...]) -> Closed:
    if algorithm == "direct":
        return Closed(1, 1 / n)
    if algorithm == "pairwise":
        return Closed(n - 1, (n - 1) / n)
    if algorithm == "bruck":
        moved = [sum(1 for way in range(n) if way >> bit & 1) for bit in range((n - 1).bit_length())]
        return Closed(len(moved), sum(moved) / n)
    axes = [dim for dim in dims or square_dims(n) if dim > 1]
    return Closed(len(axes), sum(1 / dim for dim in axes))


def _torus_volumes(dims: tuple[int, ...]) -> list[float]:
    """Of each step, the share of the payload on the busiest link.

    Equal axes: every link carries one part at a time, (n-1)/n of the payload divided by all links of a rank.
    Of unequal axes a short one is done early, and its parts meet others on the long one.
    """
    parts = []
    for part in range(2 * len(dims)):
        order = [(part // 2 + k) % len(dims) for k in range(len(dims))]
        held, moves = 1 / prod(dims) / (2 * len(dims)), []
        for axis in order:
            way = 0 if dims[axis] == 2 else part % 2  # both directions of an axis of 2 are one link
            moves += [((axis, way), held)] * (dims[axis] - 1)
            held *= dims[axis]
        parts.append(moves)
    loads: list[float] = []
    for step in zip_longest(*parts):
        load: defaultdict[tuple[int, int], float] = defaultdict(float)
        for move in step:
            if move is not None:
                load[move[0]] += move[1]
        loads.append(max(load.values()))
    return loads
