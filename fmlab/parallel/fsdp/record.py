"""What happened when in a step: which unit's parameters were asked for, came, and were given back."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["asked", "here", "given back", "gradients sent"]


@dataclass(frozen=True)
class Event:
    """One moment of a step of one rank, in seconds of time.perf_counter."""

    kind: Kind
    unit: str
    seconds: float


@dataclass(repr=False)
class Record:
    """The events of one step on this rank, in the order in which they happened."""

    events: list[Event] = field(default_factory=list)

    def __repr__(self) -> str:
        counts = {kind: len(self.of(kind)) for kind in ("asked", "given back", "gradients sent")}
        return "Record(" + ", ".join(f"{kind} {n} times" for kind, n in counts.items()) + ")"

    def of(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event.kind == kind]

    def spans(self, unit: str, begin: str, end: str) -> list[tuple[float, float]]:
        """When the unit was between two kinds of events: ("asked", "here") is on its way, ("here", "given
        back") is whole."""
        mine: Iterable[Event] = (e for e in self.events if e.unit == unit and e.kind in (begin, end))
        spans, start = [], None
        for event in mine:
            if event.kind == begin:
                start = event.seconds
            elif start is not None:
                spans.append((start, event.seconds))
                start = None
        return spans
