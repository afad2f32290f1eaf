"""What happened when in a step: gradients that became ready, buckets that were sent and arrived."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["backward", "gradient", "sent", "arrived", "backward done"]


@dataclass(frozen=True)
class Event:
    """One moment of a step, in seconds of time.perf_counter; `bucket` is -1 where no bucket is meant."""

    kind: Kind
    seconds: float
    bucket: int = -1
    parameter: str = ""


@dataclass(repr=False)
class Timeline:
    """The events of the last micro-batch of one step, on this rank, in the order in which they happened."""

    events: list[Event] = field(default_factory=list)

    def __repr__(self) -> str:
        early = self.sent_before_last_gradient if self.of("gradient") else 0
        return (
            f"Timeline({len(self.of('gradient'))} gradients, {len(self.of('sent'))} buckets sent, "
            f"{early} of them before the last gradient)"
        )

    def of(self, kind: Kind) -> list[Event]:
        """The events of one kind, by time."""
        return sorted((event for event in self.events if event.kind == kind), key=lambda event: event.seconds)

    @property
    def sent_before_last_gradient(self) -> int:
        """How many buckets were sent while the backward pass still had gradients to make."""
        last = self.of("gradient")[-1].seconds
        return sum(event.seconds < last for event in self.of("sent"))

    @property
    def hidden_share(self) -> float:
        """The part of the time with communication under way that lies inside the backward pass (0 to 1)."""
        arrived = {event.bucket: event.seconds for event in self.of("arrived")}
        spans = [(event.seconds, arrived[event.bucket]) for event in self.of("sent")]
        end = self.of("backward done")[-1].seconds
        whole = _covered(spans)
        return (
            _covered((start, min(stop, end)) for start, stop in spans if start < end) / whole
            if whole
            else 0.0
        )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
