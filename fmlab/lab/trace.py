"""Reading a trace of torch.profiler: who ran when, and how long by itself.

A trace is a list of events with a start and a duration in microseconds. An operator that calls others
contains their events; its *own* time is what remains of its duration without them.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MICRO = 1e-6


@dataclass(frozen=True)
class Span:
    """One event. start, seconds: on the profiler's clock; own: seconds without the spans inside it.

    within: the names of the spans around it, outermost first.
    """

    name: str
    start: float
    seconds: float
    own: float
    within: tuple[str, ...] = ()


def read_trace(path: str | Path) -> list[Span]:
    """The spans of operators and of `record_function` in a trace written by `export_chrome_trace`, by start.

    Raises ValueError when the file is not such a trace.
    """
    text = json.loads(Path(path).read_text())
    if not isinstance(text, dict) or "traceEvents" not in text:
        raise ValueError(f"{path} is no trace of torch.profiler: it has no traceEvents")
    wanted = ("cpu_op", "user_annotation")
    events = [event for event in text["traceEvents"] if event.get("ph") == "X" and event.get("cat") in wanted]
    threads: dict[object, list[tuple[str, float, float]]] = {}
    for event in events:
        threads.setdefault(event["tid"], []).append((event["name"], event["ts"], event["dur"]))
    return sorted((span for one in threads.values() for span in nested(one)), key=lambda span: span.start)


def nested(events: Iterable[tuple[str, float, float]]) -> list[Span]:
    """Spans of the events (name, start, duration, in microseconds) of one thread, one inside another."""
    ordered = sorted(events, key=lambda event: (event[1], -event[2]))
    own = [duration for _, _, duration in ordered]
    around: list[tuple[str, ...]] = []
    inside: list[int] = []  # the events that have not ended, outermost first
    for at, (_, start, duration) in enumerate(ordered):
        while inside and start >= ordered[inside[-1]][1] + ordered[inside[-1]][2]:
            inside.pop()
        if inside:
            own[inside[-1]] -= duration
        around.append(tuple(ordered[outer][0] for outer in inside))
        inside.append(at)
    return [
        Span(name, start * MICRO, duration * MICRO, max(0.0, mine) * MICRO, within)
        for (name, start, duration), mine, within in zip(ordered, own, around, strict=True)
    ]


def own_seconds(spans: Iterable[Span], kind: Callable[[Span], str | None]) -> dict[str, float]:
    """Own seconds added up by what `kind` says of a span; None leaves it out."""
    total: dict[str, float] = {}
    for span in spans:
        group = kind(span)
        if group is not None:
            total[group] = total.get(group, 0.0) + span.own
    return total
