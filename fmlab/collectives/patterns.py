"""Schedules without their chunks: which messages of which size, and how often the same step repeats.

A ring over 1,024 ranks has two million messages, but each of its steps is the same as the first. To price it,
one step and a number are enough. `patterns` gives the same messages as `schedule` does, as shares of the
payload; tests hold the two together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, zip_longest
from math import prod

from fmlab.collectives.algorithms import schedule
from fmlab.collectives.grids import lines, turns
from fmlab.collectives.halving import doubling_sizes, partner
from fmlab.collectives.schedule import Link, Schedule


@dataclass(frozen=True)
class Pattern:
    """`count` equal steps. messages: (source, destination) -> sizes as shares of the payload."""

    count: int
    messages: tuple[tuple[Link, float], ...]

    def backwards(self) -> "Pattern":
        return Pattern(self.count, tuple(((b, a), size) for (a, b), size in self.messages))


def of_schedule(plan: Schedule) -> list[Pattern]:
    """The patterns of any schedule; equal steps that follow one another are one."""
    share = 0.0 if plan.collective == "barrier" else 1 / plan.chunks
    if plan.collective == "all_to_all":
        share = 1 / plan.n
    steps = (tuple(((s.source, s.destination), len(s.chunks) * share) for s in step) for step in plan.steps)
    return _compress(steps)


def _compress(steps: Iterable[tuple[tuple[Link, float], ...]]) -> list[Pattern]:
    return [
        Pattern(sum(1 for _ in group), messages)
        for messages, group in groupby(steps, key=lambda m: tuple(sorted(m)))
    ]


@lru_cache(maxsize=256)
def patterns(
    collective: str,
    algorithm: str,
    n: int,
    segments: int | None = None,
    dims: tuple[int, ...] = (),
    between: str = "ring",
) -> tuple[Pattern, ...]:
    """The patterns of `schedule(collective, algorithm, n, ...)`, made in O(n) for what has many chunks."""
    gather = {
        "ring": lambda: _ring(n, (1,)),
        "bidirectional_ring": lambda: _ring(n, (1, -1)),
        "halving_doubling": lambda: _doubling(n),
        "torus": lambda: _torus(dims),
        "hierarchical": lambda: _hierarchical(dims, between),
    }
    if collective == "all_to_all" and dims:
        return tuple(_grid_all_to_all(dims))
    scatter_or_gather = collective in ("all_reduce", "all_gather", "reduce_scatter")
    if n == 1 or not (scatter_or_gather and algorithm in gather):
        plan = schedule(collective, algorithm, n, segments=segments, dims=dims or None)
        return tuple(of_schedule(plan))
    forward = gather[algorithm]()
    back = [pattern.backwards() for pattern in reversed(forward)]
    if algorithm in ("ring", "bidirectional_ring"):
        back = forward  # both phases of a ring go round the same way
    phases = {"all_gather": forward, "reduce_scatter": back, "all_reduce": back + forward}
    return tuple(phases[collective])


def _ring(n: int, ways: Sequence[int]) -> list[Pattern]:
    size = 1 / n / len(ways)
    return [Pattern(n - 1, tuple(((r, (r + way) % n), size) for r in range(n) for way in ways))]


def _doubling(n: int) -> list[Pattern]:
    return [
        Pattern(1, tuple(((r, partner(r, have, n)), moved / n) for r in range(n)))
        for have, moved in doubling_sizes(n)
    ]


def _torus(dims: Sequence[int]) -> list[Pattern]:
    """Step by step, which axis each part is on, in which direction, and what it carries."""
    parts = []
    for order, way in turns(len(dims)):
        held, moves = 1 / prod(dims) / (2 * len(dims)), []
        for axis in order:
            moves += [(axis, way, held)] * (dims[axis] - 1)
            held *= dims[axis]
        parts.append(moves)
    ordered = [tuple(move for move in step if move is not None) for step in zip_longest(*parts)]
    found = []
    for step, group in groupby(ordered):
        messages = []
        for axis, way, size in step:
            for line in lines(dims, axis):
                messages += [((r, line[(i + way) % len(line)]), size) for i, r in enumerate(line)]
        found.append(Pattern(sum(1 for _ in group), tuple(messages)))
    return found


def _hierarchical(dims: Sequence[int], between: str) -> list[Pattern]:
    hosts, local = dims[0], prod(dims[1:])
    n, found = hosts * local, []
    if between == "ring" and hosts > 1:
        found.append(Pattern(hosts - 1, tuple(((r, (r + local) % n), 1 / n) for r in range(n))))
    else:
        for have, moved in doubling_sizes(hosts):
            links = [(r, partner(r // local, have, hosts) * local + r % local) for r in range(n)]
            found.append(Pattern(1, tuple((link, moved / n) for link in links)))
    if len(dims) > 2:
        return found + [_on_all_hosts(one, hosts, local) for one in _torus(dims[1:])]
    if local > 1:
        inside = tuple(((r, r - r % local + (r + 1) % local), 1 / local) for r in range(n))
        found.append(Pattern(local - 1, inside))
    return found


def _on_all_hosts(one: Pattern, hosts: int, local: int) -> Pattern:
    """What goes on inside host 0, in all of them."""
    firsts = range(0, hosts * local, local)
    return Pattern(one.count, tuple(((f + a, f + b), size) for f in firsts for (a, b), size in one.messages))


def _grid_all_to_all(dims: Sequence[int]) -> list[Pattern]:
    """Along each axis, the last one first, every rank sends to all others of its line."""
    found = []
    for axis in reversed(range(len(dims))):
        pairs = [(a, b) for line in lines(dims, axis) for a in line for b in line if a != b]
        found.append(Pattern(1, tuple((pair, 1 / dims[axis]) for pair in pairs)))
    return [one for one in found if one.messages]
