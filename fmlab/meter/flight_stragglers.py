"""How long each rank kept the others waiting, from when ranks entered the same collectives.

A rank that enters a collective last kept the others from the moment the last but one had entered. Several
collectives may be under way at once, so that moments are counted, not collectives: a rank's time is the
length of all such spans together. Collectives in which only one side waits (broadcast, scatter, messages) are
left out. Clocks of several hosts must agree to within what is measured; `offsets` puts them right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fmlab.meter.flight import Dump, FlightEntry

_ALL_WAIT = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "alltoall", "barrier"}


@dataclass(frozen=True)
class Waiting:
    """One rank: seconds that it kept all others of a group waiting, that it waited itself, and the call to
    which it came latest, with its line."""

    rank: int
    kept: float
    waited: float
    latest: float
    call: str
    line: str


@dataclass(frozen=True)
class Stragglers:
    """The ranks, and the seconds between the first and the last collective that all dumps hold."""

    rows: tuple[Waiting, ...]
    seconds: float
    collectives: int

    @property
    def worst(self) -> Waiting | None:
        """The rank that kept the others waiting longest."""
        return max(self.rows, key=lambda row: row.kept, default=None)

    def __str__(self) -> str:
        lines = [f"{'rank':>4}{'kept others':>14}{'share':>8}{'waited':>10}  latest to"]
        for row in self.rows:
            share = row.kept / self.seconds if self.seconds else 0.0
            at = f"{row.call} by {row.latest * 1e3:.1f} ms, at {row.line}" if row.call else ""
            lines.append(f"{row.rank:>4}{row.kept:>12.3f} s{share:>8.1%}{row.waited:>8.3f} s  {at}")
        lines.append(f"{self.collectives} collectives in {self.seconds:.3f} s")
        return "\n".join(lines)


# region stragglers
def stragglers(dumps: Sequence[Dump], offsets: Mapping[int, float] | None = None) -> Stragglers:
    """Who kept whom waiting over the collectives that all members' dumps hold.

    offsets: seconds that a rank's clock is ahead.
    """
    offsets = offsets or {}
    met = _met(dumps)
    kept: dict[int, list[tuple[float, float]]] = {dump.rank: [] for dump in dumps}
    waited: dict[int, list[tuple[float, float]]] = {dump.rank: [] for dump in dumps}
    latest: dict[int, tuple[float, FlightEntry]] = {}
    moments = []
    for entered in met:
        order = sorted((entry.issued - offsets.get(rank, 0.0), rank) for rank, entry in entered.items())
        (last, who), (before, _) = order[-1], order[-2]
        moments += [order[0][0], last]
        kept[who].append((before, last))
        for at, rank in order[:-1]:
            waited[rank].append((at, last))
        if last - before > latest.get(who, (0.0,))[0]:
            latest[who] = (last - before, entered[who])
    rows = []
    for rank in sorted(kept):
        late, entry = latest.get(rank, (0.0, None))
        line = entry.lines[0] if entry is not None and entry.lines else ""
        rows.append(Waiting(rank, _length(kept[rank]), _length(waited[rank]), late, str(entry or ""), line))
    return Stragglers(tuple(rows), max(moments, default=0.0) - min(moments, default=0.0), len(met))


# endregion


def _met(dumps: Sequence[Dump]) -> list[dict[int, FlightEntry]]:
    """Each collective that every member of its group has in its dump, by rank."""
    table: dict[tuple[str, int], dict[int, FlightEntry]] = {}
    for dump in dumps:
        for entry in dump.entries:
            if entry.op in _ALL_WAIT and len(entry.ranks) > 1:
                table.setdefault((entry.group, entry.number), {})[dump.rank] = entry
    return [entered for entered in table.values() if set(entered) == set(next(iter(entered.values())).ranks)]


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that are in one of the spans at least."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
