"""Record sections of a run on shapes, charged to a chip as every operator on a simulated chip is.

It is the simulated chip of fmlab.sim.mode without memory limit, on the meta device; this only cuts its trace
into sections and counts memory from where a section begins.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fmlab.chips import Chip
from fmlab.sim.charge import dtype_name
from fmlab.sim.event import Event, Phase
from fmlab.sim.mode import simulated_mode
from fmlab.sim.simulated import Execution, Simulated
from fmlab.sim.trace import Trace, record


@dataclass(frozen=True)
class Mark:
    """Where a section begins: position in the trace, and bytes alive."""

    position: int
    live: int


class Recorder:
    """A context in which operators on meta tensors are charged to `chip`.

    execution: "eager" or "compiled" (chains of pointwise operators in one kernel); None: as the chip's
        software works. achievable: matrix products at the rate that a named source measured.
    assumed_flops: dtype -> FLOP/s, where no source gives a rate.
    """

    def __init__(
        self,
        chip: Chip,
        execution: Execution | None = None,
        achievable: bool = False,
        assumed_flops: Mapping[str, float] | None = None,
    ) -> None:
        self.chip = chip
        self.settings = dict(execution=execution, achievable=achievable, assumed_flops=assumed_flops)
        self._again: set[int] = set()  # positions of events that only make activations again
        self._stack = ExitStack()
        self._chip: Simulated | None = None
        self._trace: Trace | None = None

    def __enter__(self) -> "Recorder":
        settings: dict[str, Any] = dict(self.settings)
        self._chip = self._stack.enter_context(
            simulated_mode(self.chip, dry=True, unlimited=True, **settings)
        )
        self._trace = self._stack.enter_context(record(self._chip))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def simulated(self) -> Simulated:
        """The simulated chip."""
        assert self._chip is not None
        return self._chip

    @property
    def trace(self) -> Trace:
        """Everything so far."""
        assert self._trace is not None
        return self._trace

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self.simulated.memory.live

    def mark(self) -> Mark:
        """Begin a section; its peak counts from here."""
        self.simulated.flush()
        self.simulated.memory.reset_peak()
        return Mark(len(self.trace), self.live)

    def since(self, mark: Mark, phase: Phase) -> tuple[tuple[Event, ...], int, frozenset[int]]:
        """A section: its events, the most bytes above those alive when it began, and which events ran inside
        `making_again`."""
        self.simulated.flush()
        events = tuple(
            replace(event, phase=phase, live_bytes_after=event.live_bytes_after - mark.live)
            for event in self.trace[mark.position :]
        )
        again = frozenset(at - mark.position for at in self._again if at >= mark.position)
        return events, self.simulated.memory.peak - mark.live, again

    @contextmanager
    def making_again(self) -> Iterator[None]:
        """What runs in it makes activations a second time."""
        self.simulated.flush()
        first = len(self.trace)
        yield
        self.simulated.flush()
        self._again.update(range(first, len(self.trace)))

    def message(self, collective: str, tensor: Tensor) -> None:
        """Note a message of the tensor-parallel group, in its place; it is priced later."""
        event = Event(
            "collective",
            collective,
            seconds=0.0,
            dtype=dtype_name(tensor.dtype),
            live_bytes_after=self.live,
            shape=tuple(tensor.shape),
            collective=collective,
            payload_bytes=tensor.numel() * tensor.itemsize,
        )
        self.simulated.between(lambda: self.trace.append(event))
