"""What the flight recorders of all ranks say together: who is missing, who entered what else, who waits.

Every open call waits for ranks: a collective for the members of its group that have not entered it, a message
for its peer until that has asked for the other side of it. Followed from rank to rank, the waiting ends at a
rank that waits for nobody (it is late, gone, or done), or it goes in a circle (a deadlock).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fmlab.entered import Disagreement, differ, name_ranks
from fmlab.meter.flight import Dump, FlightEntry

# The words of ProcessGroupWrapper and of monitored_barrier in torch 2.9 and 2.13.
_PRINT = (
    r"Rank (?P<rank{0}>\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, "
    r"OpType=(?P<op{0}>\w+)(?:, TensorShape=\[(?P<shape{0}>[^\]]*)\], TensorDtypes=(?P<dtype{0}>\w+))?"
)
_CHECKED = re.compile(_PRINT.format(1) + r".*?but " + _PRINT.format(2), re.DOTALL)
_MISSED = re.compile(r"Ranks ([\d, ]+) failed to pass monitoredBarrier")
_SAME = "On gloo, a tensor of another shape or type ends a process, too: --check-collectives tells"


@dataclass(frozen=True)
class Verdict:
    """kind: "mismatch" (other op, shape or dtype), "absent" (did not enter), "dead" (no dump), "deadlock" (a
    circle), "stuck" (all entered, and it does not end) or "none" (nothing was open). ranks: to blame, if any
    are. headline: it in one sentence. lines: what each rank was doing."""

    kind: str
    ranks: tuple[int, ...]
    headline: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  {line}" for line in self.lines)])


# region verdict
def verdict(dumps: Sequence[Dump], gone: Sequence[int] | None = None) -> Verdict:
    """Why a run does not go on, from the dumps of the ranks that could still write one.

    gone: ranks whose process is known to be gone; by default those without a dump. Raises ValueError without
    dumps.
    """
    if not dumps:
        raise ValueError("a verdict needs the dump of one rank at least")
    by_rank = {dump.rank: dump for dump in dumps}
    lines = tuple(_doing(by_rank[rank]) for rank in sorted(by_rank))
    size = max(dump.world_size for dump in dumps)
    gone = [rank for rank in range(size) if rank not in by_rank] if gone is None else list(gone)
    lines += tuple(
        f"rank {rank}: left no dump; its process is gone, or its threads cannot run" for rank in gone
    )
    kind, ranks, headline = _refused(by_rank) or _mismatch(by_rank) or _wait(by_rank, gone)
    return Verdict(kind, ranks, headline, lines)


# endregion


def _refused(dumps: Mapping[int, Dump]) -> tuple[str, tuple[int, ...], str] | None:
    """What torch's own check says that compares collectives before they run (--check-collectives)."""
    for dump in dumps.values():
        if found := _CHECKED.search(dump.error):
            a, b = (_fingerprint(found, side) for side in (1, 2))
            first, other = int(found["rank1"]), int(found["rank2"])
            lines = [f"rank {r} {_at(dumps[r].lines)}" for r in (first, other) if r in dumps]
            said = f"rank {other} was about to enter {b} where rank {first} was about to enter {a}"
            return "mismatch", (other,), f"{said}: {'; '.join(lines)}"
        if found := _MISSED.search(dump.error):
            ranks = tuple(sorted(int(rank) for rank in found[1].split(",")))
            lines = [f"rank {r} is {_at(dumps[r].lines)}" for r in ranks if r in dumps]
            said = f"{name_ranks(ranks)} did not enter the collective that rank {dump.rank} is in"
            return "absent", ranks, f"{said}, {_at(dump.lines)}; {'; '.join(lines)}"
    return None


def _fingerprint(found: "re.Match[str]", side: int) -> str:
    op, shape, dtype = (found[f"{name}{side}"] for name in ("op", "shape", "dtype"))
    return op.lower() + (f" {dtype.lower()}[{shape}]" if dtype else "")


def _mismatch(dumps: Mapping[int, Dump]) -> tuple[str, tuple[int, ...], str] | None:
    """The first collective that ranks entered under one number and that does not fit."""
    table: dict[tuple[str, int], dict[int, FlightEntry]] = {}
    for rank, dump in dumps.items():
        for entry in dump.entries:
            if not entry.is_message:
                table.setdefault((entry.group, entry.number), {})[rank] = entry
    for (group, number), entered in sorted(
        table.items(), key=lambda kv: min(e.issued for e in kv[1].values())
    ):
        ones = {rank: entry.collective for rank, entry in entered.items()}
        if len(ones) > 1 and differ(list(ones.values())):
            wrong = Disagreement(group, number, dict(ones)).culprits
            right = [rank for rank in ones if ones[rank] != ones[wrong[0]]]
            headline = (
                f"{name_ranks(wrong)} entered {ones[wrong[0]]} where {name_ranks(right)} entered "
                f"{ones[right[0]]}{_in_group(entered[right[0]], dumps)}: "
                f"{_place(entered, wrong[0], dumps)}; the others {_place(entered, right[0], dumps)}"
            )
            return "mismatch", tuple(wrong), headline
    return None


# region waiting
def _wait(dumps: Mapping[int, Dump], gone: Sequence[int]) -> tuple[str, tuple[int, ...], str]:
    """Who waits for whom, followed to its end."""
    known = {*dumps, *gone}
    waits = {rank: found for rank, dump in dumps.items() if (found := _awaited(dump, dumps, known))}
    for_dead = sorted(rank for rank, (awaited, _) in waits.items() if set(awaited) & set(gone))
    if for_dead:
        call = waits[for_dead[0]][1]
        verb = "wait" if len(for_dead) > 1 else "waits"
        place = _at(call.lines or dumps[for_dead[0]].lines)
        end = f"{name_ranks(for_dead)} {verb} for it in {call}, {place}. {_SAME}"
        return "dead", tuple(gone), f"{name_ranks(gone)} left no dump, and {end}"
    if gone and not waits:
        return "dead", tuple(gone), f"{name_ranks(gone)} left no dump, and no other rank waits for it"
    roots = sorted({rank for awaited, _ in waits.values() for rank in awaited} - set(waits))
    if roots:
        waiting = sorted(rank for rank, (awaited, _) in waits.items() if set(awaited) & set(roots))
        call = waits[waiting[0]][1]
        verb = "wait" if len(waiting) > 1 else "waits"
        headline = (
            f"{name_ranks(roots)} did not enter {_other_side(call)}{_in_group(call, dumps)}, for which "
            f"{name_ranks(waiting)} {verb}: {_now(dumps[roots[0]])}"
        )
        return "absent", tuple(roots), headline
    if waits:
        circle = _circle({rank: awaited for rank, (awaited, _) in waits.items()})
        calls = {rank: waits[rank][1] for rank in circle}
        steps = [
            f"rank {rank} waits in {call}, {_at(call.lines or dumps[rank].lines)}"
            for rank, call in calls.items()
        ]
        return "deadlock", tuple(sorted(circle)), "each waits for the next: " + "; ".join(steps)
    stuck = {rank: entry for rank, dump in dumps.items() if (entry := _open(dump)) is not None}
    if stuck:
        first = next(iter(stuck.values()))
        headline = f"all ranks entered {first}, and it does not end: look at the network and the devices"
        return "stuck", (), headline
    return "none", (), "no collective or message was open: the ranks were not waiting for each other"


# endregion


def _awaited(
    dump: Dump, dumps: Mapping[int, Dump], known: Collection[int]
) -> tuple[list[int], FlightEntry] | None:
    """(ranks that a rank waits for, the call in which it does): of its oldest open call that waits."""
    for entry in dump.entries:
        if not entry.ended:
            awaited = [
                r for r in _others(entry, dump.rank) if not _has_entered(dumps.get(r), entry, dump.rank)
            ]
            if awaited:
                return awaited, entry
    return None


def _others(entry: FlightEntry, rank: int) -> list[int]:
    if entry.is_message:
        return [] if entry.peer is None else [entry.peer]
    return [other for other in entry.ranks if other != rank]


def _has_entered(other: Dump | None, entry: FlightEntry, rank: int) -> bool:
    if other is None:
        return False
    if not entry.is_message:
        return other.last.get(entry.group, 0) >= entry.number
    counterpart = "recv" if entry.op == "send" else "send"
    theirs = [e.number for e in other.entries if e.op == counterpart and e.peer in (rank, None)]
    return max(theirs, default=0) >= entry.number


def _open(dump: Dump) -> FlightEntry | None:
    return next((entry for entry in dump.entries if not entry.ended), None)


def _circle(waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first."""
    path = [min(waits)]
    while True:
        rank = min(waits[path[-1]], key=lambda r: (r not in path, r))
        if rank in path:
            return path[path.index(rank) :]
        path.append(rank)


# region words
def _doing(dump: Dump) -> str:
    """What a rank was doing, in a line."""
    who = f"rank {dump.rank}" + (f" ({dump.host})" if dump.host else "")
    entry = _open(dump)
    if dump.state == "finished":
        return f"{who}: has finished" + (f"; its last call was {dump.entries[-1]}" if dump.entries else "")
    if dump.state == "raised":
        inside = f" in {entry}" if entry is not None else ""
        return f"{who}: raised {_first_line(dump.error)}{inside}, {_at(dump.lines)}"
    if entry is not None:
        waited = f", {dump.at - entry.issued:.1f} s ago" if dump.at else ""
        return f"{who}: in {entry}{waited}, {_at(entry.lines or dump.lines)}"
    return f"{who}: {_now(dump)}"


def _now(dump: Dump) -> str:
    if dump.state == "finished":
        last = f" after {dump.entries[-1]}" if dump.entries else ""
        return "it has finished" + last
    if dump.state == "raised":
        return f"it raised {_first_line(dump.error)}, {_at(dump.lines)}"
    entry = _open(dump)
    inside = f"in {entry}, " if entry is not None else ""
    return f"it is {inside}{_at(dump.lines)}"


def _place(entered: Mapping[int, FlightEntry], rank: int, dumps: Mapping[int, Dump]) -> str:
    """Where a rank issued a call; where the recorder has no lines, where it waits for it."""
    entry = entered[rank]
    return _at(entry.lines or (() if entry.ended else dumps[rank].lines))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _at(lines: Sequence[str]) -> str:
    """The innermost line of a stack, and the one that called it."""
    if not lines:
        return "at no line of Python's"
    caller = f" (from {lines[1].partition(': ')[0]})" if len(lines) > 1 else ""
    return f"at {lines[0]}{caller}"


def _other_side(entry: FlightEntry) -> str:
    if not entry.is_message:
        return str(entry)
    return f"the {'recv' if entry.op == 'send' else 'send'} of {entry}"


def _in_group(entry: FlightEntry, dumps: Mapping[int, Dump]) -> str:
    """Which ranks the group is of, where it is not of all."""
    size = max(dump.world_size for dump in dumps.values())
    return f" of the group of {name_ranks(entry.ranks)}" if 0 < len(entry.ranks) < size else ""


# endregion
