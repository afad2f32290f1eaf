"""Record what simulated chips do, event by event, and sum it up as a profiler does.

    with record() as trace:
        step()
    print(trace.summary())

A trace is a list of `Event` in the order in which they were charged. All times are modelled.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fmlab.sim import attached
from fmlab.sim.event import Event
from fmlab.sim.simulated import Simulated
from fmlab.sim.units import binary, decimal, duration


@dataclass(frozen=True)
class Row:
    """All events of one name (or module), added up; share is of the busy time of all compute events."""

    name: str
    calls: int
    seconds: float
    flops: int
    bytes: int
    share: float


class Trace(list[Event]):
    """The events of one chip. `chip` is the chip, or None for events from elsewhere (a dry run)."""

    def __init__(self, events: Sequence[Event] = (), chip: Simulated | None = None) -> None:
        super().__init__(events)
        self.chip = chip

    @property
    def seconds(self) -> float:
        """From the first event's start to the last end."""
        return max((e.end for e in self), default=0.0) - min((e.start for e in self), default=0.0)

    def busy(self, kind: str = "compute") -> float:
        """Seconds with at least one event of a kind under way."""
        total, reached = 0.0, float("-inf")
        for event in sorted((e for e in self if e.kind == kind), key=lambda e: e.start):
            total += max(0.0, event.end - max(event.start, reached))
            reached = max(reached, event.end)
        return total

    def exposed_communication(self) -> float:
        """Seconds in which a message is under way and nothing is computed."""
        both = Trace([e for e in self if e.kind != "copy"])
        covered, reached = 0.0, float("-inf")
        for event in sorted(both, key=lambda e: e.start):
            covered += max(0.0, event.end - max(event.start, reached))
            reached = max(reached, event.end)
        return covered - self.busy("compute")

    @property
    def flops(self) -> int:
        """Floating point operations of all events."""
        return sum(event.flops for event in self)

    @property
    def utilisation(self) -> float | None:
        """FLOPs a second over the whole trace, over the chip's peak for the dtype with the most FLOPs.

        None without FLOPs, or for a trace that belongs to no chip.
        """
        counts: dict[str, int] = defaultdict(int)
        for event in self:
            counts[event.dtype] += event.flops
        dtype = max(counts, key=lambda name: counts[name], default="")
        if self.chip is None or not counts.get(dtype) or not self.seconds:
            return None
        return self.flops / self.seconds / self.chip.roofline(dtype).peak

    def bound_shares(self) -> dict[str, float]:
        """Share of the compute events' time by what limits them: "compute", "memory", "overhead"."""
        seconds: dict[str, float] = defaultdict(float)
        for event in self:
            if event.kind == "compute":
                seconds[event.bound or "nothing"] += event.seconds
        total = sum(seconds.values())
        return {bound: part / total for bound, part in sorted(seconds.items())} if total else {}

    def top(self, count: int = 10, by: str = "name") -> list[Row]:
        """The names (by="name"), modules ("module") or phases ("phase") that take most time."""
        if by not in ("name", "module", "phase"):
            raise ValueError(f"by={by!r}: legal are 'name', 'module' and 'phase'")
        groups: dict[str, list[Event]] = defaultdict(list)
        for event in self:
            if event.kind == "compute":
                groups[getattr(event, by)].append(event)
        total = sum(e.seconds for events in groups.values() for e in events) or 1.0
        rows = [
            Row(
                name,
                len(events),
                sum(e.seconds for e in events),
                sum(e.flops for e in events),
                sum(e.bytes for e in events),
                sum(e.seconds for e in events) / total,
            )
            for name, events in groups.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)[:count]

    def summary(self, count: int = 10) -> str:
        """Modelled time, utilisation, what limits it, and the operators that take most of it."""
        use = self.utilisation
        lines = [
            f"modelled: {duration(self.seconds)}, of which computing {duration(self.busy())}; "
            f"{decimal(self.flops, 'FLOP')}" + (f", {100 * use:.1f}% of the peak rate" if use else "")
        ]
        shares = ", ".join(f"{100 * share:.0f}% {bound}" for bound, share in self.bound_shares().items())
        lines.append(f"limited by: {shares or 'nothing'}")
        if any(event.kind == "collective" for event in self):
            lines.append(
                f"messages {duration(self.busy('collective'))}, not hidden behind computing: "
                f"{duration(self.exposed_communication())}"
            )
        lines.append(f"{'operator':<44}{'calls':>7}{'time':>11}{'share':>8}{'FLOP':>12}{'bytes':>12}")
        for row in self.top(count):
            lines.append(
                f"{row.name[:43]:<44}{row.calls:>7}{duration(row.seconds):>11}{100 * row.share:>7.1f}%"
                f"{decimal(row.flops, ''):>12}{binary(row.bytes):>12}"
            )
        return "\n".join(lines)


@contextmanager
def record(chip: Simulated | int | None = None) -> Iterator[Trace]:
    """The trace of one chip (default: the current one), filled while the block runs.

    Raises RuntimeError when there is none, or when one is being recorded already.
    """
    if not isinstance(chip, Simulated):
        chip = attached.chip_at(chip)
    if chip.trace is not None:
        raise RuntimeError(f"{chip.memory.name} is being recorded already")
    chip.flush()
    for stream in chip.clock.streams:  # positions of an earlier trace mean nothing in this one
        stream.last, stream.after = None, set()
    trace = Trace(chip=chip)
    chip.trace = trace
    try:
        yield trace
        chip.flush()
    finally:
        chip.trace = None
