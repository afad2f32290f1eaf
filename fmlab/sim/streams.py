"""`torch.sim`: what torch and its users expect of a device's module, on modelled time.

Streams and events are those of torch.cuda in name and meaning. An event's time is modelled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fmlab.sim import attached
from fmlab.sim.clock import StreamState
from fmlab.sim.simulated import Simulated


class Event:
    """A moment on a stream. `elapsed_time` is in modelled milliseconds, as torch has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._moment: float | None = None
        self._position: int | None = None
        self._chip: Simulated | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        """Now on a stream: when all that it was given before is done."""
        stream = stream or current_stream()
        self._chip = stream.chip

        def note() -> None:
            self._moment, self._position = stream.state.ready, stream.state.last

        stream.chip.between(note)

    def wait(self, stream: "Stream | None" = None) -> None:
        """Let a stream do nothing before this moment."""
        stream = stream or current_stream()

        def wait() -> None:
            if self._moment is not None:
                stream.state.wait(self._moment, self._position)

        stream.chip.between(wait)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        if self._chip is not None:
            self._chip.flush()
            self._chip.clock.host = max(self._chip.clock.host, self._moment or 0.0)

    def query(self) -> bool:
        """Whether it has come: always, since the numbers are there at once."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Modelled milliseconds from this moment to another."""
        for event in (self, end):
            if event._chip is not None:
                event._chip.flush()
        if self._moment is None or end._moment is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end._moment - self._moment) * 1e3


class Stream:
    """A queue of work of one chip; without a state, a new one."""

    def __init__(
        self, device: Any = None, priority: int = 0, state: StreamState | None = None, **_: Any
    ) -> None:
        self.chip = attached.chip_at(device)
        self.state = self.chip.clock.new_stream() if state is None else state
        self.device = self.chip.device

    @property
    def stream_id(self) -> int:
        """Its number; 0 is the default one."""
        return self.state.number

    def wait_stream(self, other: "Stream") -> None:
        """Do nothing before all that `other` was given so far is done."""
        self.chip.between(lambda: self.state.wait(other.state.ready, other.state.last))

    def wait_event(self, event: Event) -> None:
        """Do nothing before an event."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """An event at the end of what it was given so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self.chip.flush()
        self.chip.clock.synchronize(self.state)

    def query(self) -> bool:
        """Whether its work is done: always, since the numbers are there at once."""
        return True

    def __enter__(self) -> "Stream":
        self._before = self.chip.clock.current
        self.chip.clock.current = self.state
        return self

    def __exit__(self, *_: Any) -> None:
        self.chip.clock.current = self._before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.state is other.state

    def __hash__(self) -> int:
        return id(self.state)


def current_stream(device: Any = None) -> Stream:
    """The stream that this thread gives its work to."""
    chip = attached.chip_at(device)
    return Stream(chip.index, state=chip.clock.current)


class SimModule:
    """What `torch.sim` is."""

    Stream: Any = Stream
    Event: Any = Event
    current_stream = staticmethod(current_stream)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return bool(attached.CHIPS)

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Indices that exist: one more than the highest with a chip."""
        return max(attached.CHIPS, default=-1) + 1

    def current_device(self) -> int:
        return attached.current()

    def set_device(self, device: Any) -> None:
        """Make "sim" without an index mean this device where tensors are made.

        `.to("sim")` goes to sim:0 in any case: torch fills in that index itself, and a device made in Python
        cannot tell it another.
        """
        attached.set_current(device if isinstance(device, int) else attached.chip_at(device).index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """`set_device` for a block."""
        before = attached.current()
        self.set_device(device)
        try:
            yield
        finally:
            attached.set_current(before)

    def default_stream(self, device: Any = None) -> Any:
        chip = attached.chip_at(device)
        return Stream(chip.index, state=chip.clock.streams[0])

    def set_stream(self, stream: Any) -> None:
        stream.chip.clock.current = stream.state

    @contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:
        """Give work to `stream` in this block; None changes nothing."""
        if stream is None:
            yield None
        else:
            with stream:
                yield stream

    def synchronize(self, device: Any = None) -> None:
        attached.chip_at(device).synchronize()

    # Random numbers are the CPU's: torch.manual_seed seeds them, and dropout draws what it would draw there.
    def manual_seed(self, seed: int) -> None:
        """Nothing: torch.manual_seed has seeded the generator that is used."""

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes now."""
        return attached.chip_at(device).memory.live

    def max_memory_allocated(self, device: Any = None) -> int:
        """Bytes at the highest since `reset_peak_memory_stats`."""
        return attached.chip_at(device).memory.peak

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        attached.chip_at(device).memory.reset_peak()

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        return attached.chip_at(device).memory.summary()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """As torch.cuda names them, as far as they are counted here."""
        memory = attached.chip_at(device).memory
        return {
            "allocated_bytes.all.current": memory.live,
            "allocated_bytes.all.peak": memory.peak,
            "allocation.all.allocated": memory.allocations,
        }

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes. Raises ValueError where the chip was given no limit."""
        memory = attached.chip_at(device).memory
        if memory.capacity is None:
            raise ValueError(f"{memory.name} was simulated without a limit of memory")
        return memory.capacity - memory.live, memory.capacity

    def empty_cache(self) -> None:
        """Nothing: freed memory is free at once."""

    def get_device_name(self, device: Any = None) -> str:
        return f"{attached.chip_at(device).chip.title} (simulated)"
