"""The modelled time of a simulated chip: one host that issues work, and streams that do it in order.

The host issues an operation, which takes it the launch overhead, and goes on. The operation starts when the
host has issued it and its stream is free. Two streams run side by side, each at the full rate of what it
does: that one slows the other down (they share memory bandwidth) is not modelled. What the host does besides
issuing (Python, data loading) takes no modelled time.
"""

import threading
from typing import Any

from fmlab.sim.units import duration


class StreamState:
    """One stream: when it will have done all its work, and which events of the trace it must come after."""

    __slots__ = ("after", "last", "number", "ready")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ready = 0.0
        self.last: int | None = None  # position in the trace of its last event
        self.after: set[int] = set()

    def wait(self, seconds: float, position: int | None) -> None:
        """Do nothing before a moment, which is the end of the event at `position` of the trace."""
        self.ready = max(self.ready, seconds)
        if position is not None and position != self.last:
            self.after.add(position)

    def take_after(self) -> tuple[int, ...]:
        """What the next event has to wait for; asked once."""
        after, self.after = tuple(sorted(self.after)), set()
        return after


class Clock:
    """Modelled seconds since the chip was made.

    host: when the host will issue the next operation; streams: 0 is the default one.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self.streams = [StreamState(0)]
        self._current = threading.local()

    @property
    def current(self) -> StreamState:
        """The stream to which this thread gives its work."""
        return getattr(self._current, "stream", self.streams[0])

    @current.setter
    def current(self, stream: StreamState) -> None:
        self._current.stream = stream

    def new_stream(self) -> StreamState:
        """Another stream; what it is given first starts when the host issues it."""
        self.streams.append(StreamState(len(self.streams)))
        return self.streams[-1]

    def stream(self, number: int) -> StreamState:
        """Stream number `number`, made if need be."""
        while len(self.streams) <= number:
            self.new_stream()
        return self.streams[number]

    def run(self, stream: StreamState, seconds: float, overhead: float = 0.0, earliest: float = 0.0) -> float:
        """Give an operation to a stream; when it starts."""
        self.host += overhead
        start = max(stream.ready, self.host, earliest)
        stream.ready = start + seconds
        return start

    def synchronize(self, stream: StreamState | None = None) -> None:
        """The host waits for one stream, or for all."""
        for waited in self.streams if stream is None else [stream]:
            self.host = max(self.host, waited.ready)
            for other in self.streams:
                if other is not waited and waited.last is not None:
                    other.after.add(waited.last)

    @property
    def now(self) -> float:
        """When all that was issued will be done."""
        return max(self.host, *(stream.ready for stream in self.streams))

    def __repr__(self) -> str:
        streams: Any = ", ".join(f"{s.number}: {duration(s.ready)}" for s in self.streams)
        return f"Clock(host {duration(self.host)}; streams {streams})"
