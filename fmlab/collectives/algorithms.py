"""Which algorithm does which collective, and the one way to ask for a schedule."""

import difflib
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

from fmlab.collectives.direct import (
    bruck_all_to_all,
    direct_all_gather,
    direct_all_to_all,
    direct_broadcast,
    one_shot_all_reduce,
    pairwise_all_to_all,
)
from fmlab.collectives.grids import grid_all_to_all, hierarchical_all_gather, torus_all_gather
from fmlab.collectives.halving import dissemination, doubling_all_gather
from fmlab.collectives.rings import both_ways, chain_broadcast, ring_all_gather, ring_reduce_scatter
from fmlab.collectives.schedule import COLLECTIVES, Schedule, Steps, mirror, then
from fmlab.collectives.trees import (
    binary_tree,
    renamed,
    tree_all_reduce,
    tree_broadcast,
    two_trees_all_reduce,
    two_trees_broadcast,
)

#: collective -> its algorithms
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (
        "ring", "bidirectional_ring", "tree", "double_tree", "halving_doubling", "torus", "hierarchical",
        "direct", "one_shot",
    ),
    "all_gather": ("ring", "bidirectional_ring", "halving_doubling", "torus", "hierarchical", "direct"),
    "reduce_scatter": ("ring", "bidirectional_ring", "halving_doubling", "torus", "hierarchical", "direct"),
    "broadcast": ("ring", "tree", "double_tree", "direct"),
    "reduce": ("ring", "tree", "double_tree", "direct"),
    "all_to_all": ("direct", "pairwise", "bruck", "torus", "hierarchical"),
    "barrier": ("dissemination", "tree", "ring"),
}  # fmt: skip
SEGMENTED = {"tree", "double_tree"}  # and the ring of a broadcast or reduce, which is a chain
GRIDS = {"torus", "hierarchical"}
DEFAULT_SEGMENTS = 8
INSIDE = ("ring", "direct")  # of hierarchical: the first is the default
BETWEEN = ("ring", "halving_doubling")


def check_algorithm(collective: str, algorithm: str) -> None:
    """ValueError with the legal names unless `algorithm` does `collective`."""
    if collective not in COLLECTIVES:
        near = difflib.get_close_matches(collective, COLLECTIVES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown collective {collective!r}; legal: {', '.join(COLLECTIVES)}{hint}")
    if algorithm not in ALGORITHMS[collective]:
        raise ValueError(
            f"no algorithm {algorithm!r} for {collective}; legal: {', '.join(ALGORITHMS[collective])}"
        )


def takes_segments(collective: str, algorithm: str) -> bool:
    """Whether the payload is cut into segments that follow one another."""
    chain = algorithm == "ring" and collective in ("broadcast", "reduce")
    return chain or (algorithm in SEGMENTED and collective != "barrier")


def schedule(
    collective: str,
    algorithm: str,
    n: int,
    *,
    root: int = 0,
    segments: int | None = None,
    dims: Sequence[int] | None = None,
    inside: str | None = None,
    between: str | None = None,
) -> Schedule:
    """The schedule of one collective on ranks 0 ... n-1. The same arguments give the same object.

    root: of a broadcast or reduce.
    segments: pieces that follow one another through a tree or chain (default 8).
    dims: of the grid, row-major: the axes of a torus (default: as square as n allows), or for hierarchical
        (hosts, ranks of a host) or (hosts, axes of the torus that a host is ...), without a default.
    inside: of hierarchical: "ring" (default) or "direct" inside a host that is no torus.
    between: of hierarchical: "ring" (default) or "halving_doubling" between hosts.

    Raises ValueError for what does not exist, does not fit n, or would have no effect.
    """
    check_algorithm(collective, algorithm)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of ranks, at least 1, not {n!r}")
    if not 0 <= root < n:
        raise ValueError(f"root={root} is none of the ranks 0..{n - 1}")
    if root and collective not in ("broadcast", "reduce"):
        raise ValueError(f"{collective} has no root; leave root out")
    if takes_segments(collective, algorithm):
        segments = DEFAULT_SEGMENTS if segments is None else segments
        if segments < 1 or (algorithm == "double_tree" and segments % 2):
            raise ValueError(f"segments={segments}: at least 1, and an even number for double_tree")
    elif segments is not None:
        raise ValueError(f"{collective} by {algorithm} is not cut into segments; leave segments out")
    for name, value, legal in (("inside", inside, INSIDE), ("between", between, BETWEEN)):
        if value not in (None, *legal):
            raise ValueError(f"{name}={value!r}; legal: {', '.join(legal)}")
        torus = name == "inside" and len(dims or ()) > 2
        if value is not None and (algorithm != "hierarchical" or collective == "all_to_all" or torus):
            raise ValueError(f"{collective} by {algorithm} has no {name}; leave it out")
    levels = (inside or INSIDE[0], between or BETWEEN[0])
    return _build(collective, algorithm, n, root, segments or 1, _grid(algorithm, n, dims), levels)


def _grid(algorithm: str, n: int, dims: Sequence[int] | None) -> tuple[int, ...]:
    if algorithm not in GRIDS:
        if dims is not None:
            raise ValueError(f"{algorithm} has no grid; leave dims out")
        return ()
    if dims is None:
        if algorithm == "hierarchical":
            raise ValueError("hierarchical needs dims=(hosts, ranks of a host)")
        return square_dims(n)
    if prod(dims) != n or min(dims) < 1 or (algorithm == "hierarchical" and len(dims) < 2):
        what = "dims=(hosts, ranks of a host)" if algorithm == "hierarchical" else "dims"
        raise ValueError(f"{what} must multiply to {n} ranks, not {tuple(dims)}")
    return tuple(dims)


def square_dims(n: int) -> tuple[int, int]:
    """The two factors of n that are closest to each other, the smaller one first."""
    small = next(d for d in range(int(n**0.5), 0, -1) if n % d == 0)
    return small, n // small


@lru_cache(maxsize=64)
def _build(
    collective: str,
    algorithm: str,
    n: int,
    root: int,
    segments: int,
    dims: tuple[int, ...],
    levels: tuple[str, str],
) -> Schedule:
    gather = _gathers(n, dims, levels)
    parts = {"bidirectional_ring": 2, "torus": 2 * len(dims)}.get(algorithm, 1)
    if algorithm == "hierarchical" and len(dims) > 2:
        parts = 2 * (len(dims) - 1)
    chunks = n * parts
    if n == 1:
        steps: Steps = []
        chunks = max(chunks, segments)
    elif collective == "all_gather":
        steps = gather[algorithm]()[1]
    elif collective == "reduce_scatter":
        steps = gather[algorithm]()[0]
    elif collective == "all_reduce" and algorithm in gather:
        steps = then(*gather[algorithm]())
    elif collective == "all_to_all":
        chunks, steps = n * n, _all_to_all(algorithm, n, dims)
    elif algorithm == "dissemination":
        chunks, steps = 1, dissemination(n)
    elif collective in ("all_reduce", "barrier"):
        chunks, steps = _all_reduce(algorithm, n, segments)
    else:
        chunks = 1 if algorithm == "direct" else segments
        steps = _broadcast(algorithm, n, root, segments)
        steps = mirror(steps) if collective == "reduce" else steps
    frozen = tuple(tuple(step) for step in steps if step)
    return Schedule(collective, algorithm, n, chunks, frozen, root, dims)


def _gathers(
    n: int, dims: tuple[int, ...], levels: tuple[str, str]
) -> dict[str, Callable[[], tuple[Steps, Steps]]]:
    """Algorithm -> (reduce-scatter, all-gather): an all-reduce is one after the other."""
    ranks, blocks = range(n), [(rank,) for rank in range(n)]
    pairs = [(2 * rank, 2 * rank + 1) for rank in range(n)]

    def mirrored(steps: Steps) -> tuple[Steps, Steps]:
        return mirror(steps), steps

    return {
        "ring": lambda: (ring_reduce_scatter(ranks, blocks), ring_all_gather(ranks, blocks)),
        "bidirectional_ring": lambda: (
            both_ways(ranks, pairs, "reduce_scatter"),
            both_ways(ranks, pairs, "all_gather"),
        ),
        "halving_doubling": lambda: mirrored(doubling_all_gather(ranks, blocks)),
        "direct": lambda: mirrored(direct_all_gather(ranks, blocks)),
        "torus": lambda: mirrored(torus_all_gather(dims)),
        "hierarchical": lambda: mirrored(hierarchical_all_gather(dims, *levels)),
    }


def _all_reduce(algorithm: str, n: int, segments: int) -> tuple[int, Steps]:
    if algorithm == "one_shot":
        return 1, one_shot_all_reduce(n)
    if algorithm == "double_tree":
        return segments, two_trees_all_reduce(n, segments)
    if algorithm == "tree":
        return segments, tree_all_reduce(binary_tree(n), range(segments))
    chain = chain_broadcast(range(n), 1)  # a barrier by ring: to rank 0 along the chain, and back
    return 1, then(mirror(chain), chain)


def _broadcast(algorithm: str, n: int, root: int, segments: int) -> Steps:
    order = [(root + k) % n for k in range(n)]
    if algorithm == "direct":
        return direct_broadcast(root, n)
    if algorithm == "double_tree":
        return two_trees_broadcast(root, order[1:], segments)
    if algorithm == "tree":
        return tree_broadcast(renamed(binary_tree(n), order), range(segments))
    return chain_broadcast(order, segments)


def _all_to_all(algorithm: str, n: int, dims: tuple[int, ...]) -> Steps:
    if algorithm in GRIDS:
        return grid_all_to_all(dims)
    ways = {"direct": direct_all_to_all, "pairwise": pairwise_all_to_all, "bruck": bruck_all_to_all}
    return ways[algorithm](n)
