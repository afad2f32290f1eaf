"""What a pipeline did in one step: who ran which pass when, and what each stage held meanwhile."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from fmlab.backends import Backend
from fmlab.meter.activations import saved_activations
from fmlab.parallel.pipeline.chunk import InFlight
from fmlab.sim.actions import Action


@dataclass(frozen=True)
class Pass:
    """One action as it ran.

    start, end: seconds since the stages began the step together. Waiting for a message comes before `start`.
    in_flight:  micro-batches (of a chunk) whose activations the stage holds after it
    held:       bytes that it holds for backward passes after it: what autograd saved (parameters apart), what
                came in, and the gradients that wait for a weight pass
    """

    action: Action
    start: float
    end: float
    in_flight: int
    held: int


@dataclass
class StageTrace:
    """The passes of one stage, in the order in which they ran."""

    stage: int
    passes: list[Pass] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """Seconds spent in passes."""
        return sum(one.end - one.start for one in self.passes)

    @property
    def most_in_flight(self) -> int:
        """The most micro-batches (of a chunk) whose activations were held at once."""
        return max((one.in_flight for one in self.passes), default=0)

    @property
    def most_held(self) -> int:
        """The most bytes held between two passes."""
        return max((one.held for one in self.passes), default=0)


@dataclass(repr=False)
class PipelineTrace:
    """One step of all stages, measured. `kind`: the schedule."""

    kind: str
    stages: Sequence[StageTrace]

    def __repr__(self) -> str:
        passes = sum(len(stage.passes) for stage in self.stages)
        return f"PipelineTrace({self.kind}, {len(self.stages)} stages, {passes} passes)"

    @property
    def seconds(self) -> float:
        """From the first pass of any stage to the end of the last."""
        every = [one for stage in self.stages for one in stage.passes]
        return max((p.end for p in every), default=0.0) - min((p.start for p in every), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage ran no pass, over all stages."""
        return (
            1 - sum(s.busy for s in self.stages) / (len(self.stages) * self.seconds) if self.seconds else 0.0
        )

    def order(self) -> list[list[Action]]:
        """The actions of each stage as they ran: what the schedule says, if all is well."""
        return [[one.action for one in stage.passes] for stage in self.stages]

    def mean_seconds(self, direction: str) -> float:
        """Mean length of a pass of this direction; 0 if there was none."""
        times = [p.end - p.start for s in self.stages for p in s.passes if p.action.direction == direction]
        return sum(times) / len(times) if times else 0.0


class Recorder:
    """Writes down the passes of one stage while they run."""

    def __init__(self, stage: int) -> None:
        self.trace = StageTrace(stage)

    @contextmanager
    def recording(self, model: nn.Module, backend: Backend) -> Iterator[None]:
        """Inside, a step runs; it is entered when all stages have just met."""
        self._backend, self._zero = backend, time.perf_counter()
        with saved_activations(exclude=model) as self._saved:
            yield

    def note(self, action: Action, start: float, flying: Collection[InFlight]) -> None:
        """`action` has run since `start` (of time.perf_counter), and left these micro-batches in flight."""
        self._backend.synchronize()
        held = self._saved.live + sum(one.held for one in flying)
        end = time.perf_counter()
        self.trace.passes.append(Pass(action, start - self._zero, end - self._zero, len(flying), held))
