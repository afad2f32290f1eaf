"""A collective algorithm as data: steps of messages that travel at the same time.

    plan = schedule("all_reduce", "ring", 4)
    plan.steps[0]            # (Send(0 -> 1, chunks (3,), reduce), Send(1 -> 2, ...), ...)

The payload is cut into `chunks` pieces. A message carries some of them from one rank to another, and the
receiver either adds them to its own (`reduce`) or keeps them (`copy`). All messages of a step leave with what
their sources held before that step. The same schedule is proven (`proof`), run on real ranks (`run`), counted
per link (`link_bytes`), priced on a topology (`pricing`) and drawn (`fmlab.lab.stepper`).

Two rules save half of the algorithms: a reduce-scatter is an all-gather played backwards, with additions in
place of copies, and a reduce is a broadcast played backwards (`mirror`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

__all__ = ["COLLECTIVES", "Link", "Schedule", "Send", "Step", "Steps", "mirror", "then", "together"]

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "barrier",
)

Link = tuple[int, int]  # (source, destination)


@dataclass(frozen=True, slots=True)
class Send:
    """One message. `chunks` are the pieces that it carries; `reduce`: the receiver adds them to its own."""

    source: int
    destination: int
    chunks: tuple[int, ...]
    reduce: bool = False

    def __str__(self) -> str:
        verb = "added" if self.reduce else "kept"
        return f"{self.source} -> {self.destination}: chunks {runs_text(self.chunks)}, {verb}"


Step = tuple[Send, ...]
Steps = list[list[Send]]


@dataclass(frozen=True)
class Schedule:
    """All messages of one collective on `n` ranks.

    chunks: into how many pieces the payload is cut. For all_gather and reduce_scatter chunk c belongs to rank
        c // (chunks / n); for all_to_all chunk s * n + d goes from rank s to rank d.
    root: of a broadcast or reduce.
    dims: of a grid of ranks, in row-major order (torus: its axes; hierarchical: hosts, ranks of a host).
    """

    collective: str
    algorithm: str
    n: int
    chunks: int
    steps: tuple[Step, ...]
    root: int = 0
    dims: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Send]:
        return (send for step in self.steps for send in step)

    def __str__(self) -> str:
        head = f"{self.collective} by {self.algorithm}: {self.n} ranks, {self.chunks} chunks"
        lines = [
            f"step {number}: " + "; ".join(map(str, step)) for number, step in enumerate(self.steps, start=1)
        ]
        return "\n".join([head, *lines])

    def chunk_sizes(self, payload: int) -> list[int]:
        """Elements of each chunk of a payload of so many elements: as equal as they can be.

        The payload is the whole logical tensor: what a gather puts together, what a reduce-scatter or an
        all-to-all takes in. These three need equal blocks: ValueError unless n divides the payload.
        """
        if self.collective == "barrier":
            return [0] * self.chunks
        if self.collective not in ("all_gather", "reduce_scatter", "all_to_all"):
            return split_evenly(payload, self.chunks)
        if payload % self.n:
            raise ValueError(
                f"{self.collective} of {payload} elements on {self.n} ranks: blocks must be equal; "
                f"pad to {-(-payload // self.n) * self.n} elements"
            )
        if self.collective == "all_to_all":
            return [payload // self.n] * self.chunks
        return split_evenly(payload // self.n, self.chunks // self.n) * self.n

    def link_bytes(self, payload: int, itemsize: int = 1) -> dict[Link, int]:
        """Bytes that each link (source, destination) carries for `payload` elements of `itemsize` bytes.

        Every rank's payload is the same size. Links that carry nothing are absent.
        """
        sizes = self.chunk_sizes(payload)
        total: Counter[Link] = Counter()
        for send in self:
            total[send.source, send.destination] += itemsize * sum(sizes[chunk] for chunk in send.chunks)
        return {link: count for link, count in sorted(total.items()) if count}

    def sent_by(self, payload: int, itemsize: int = 1) -> list[int]:
        """Bytes that each rank sends, by rank."""
        sent = [0] * self.n
        for (source, _), count in self.link_bytes(payload, itemsize).items():
            sent[source] += count
        return sent


def split_evenly(total: int, parts: int) -> list[int]:
    """Sizes of `parts` pieces of `total`, the first ones larger by one where it does not divide."""
    base, rest = divmod(total, parts)
    return [base + (part < rest) for part in range(parts)]


def mirror(steps: Steps) -> Steps:
    """The steps backwards in time, each message the other way and added instead of kept.

    A copy of a chunk travels from its owner along a tree to everybody. Backwards, that tree collects
    everybody's contribution at the owner.
    """
    return [
        [Send(send.destination, send.source, send.chunks, reduce=True) for send in step]
        for step in reversed(steps)
    ]


def then(*phases: Steps) -> Steps:
    """One phase after the other."""
    return [step for phase in phases for step in phase]


def together(phases: Iterable[Steps]) -> Steps:
    """Phases that run at the same time: their first steps together, then their second ones, and so on."""
    return [[send for step in steps if step is not None for send in step] for steps in zip_longest(*phases)]


def runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive chunks as (first, behind the last): each is one piece of memory."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and found[-1][1] == chunk:
            found[-1] = (found[-1][0], chunk + 1)
        else:
            found.append((chunk, chunk + 1))
    return found


def runs_text(chunks: Sequence[int]) -> str:
    """As in "0-3, 7"."""
    return ", ".join(
        str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in runs(chunks)
    )
