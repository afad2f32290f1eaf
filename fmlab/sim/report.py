"""What a dry run found out. Every number is modelled."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fmlab.chips import Chip
from fmlab.sim.event import Event
from fmlab.sim.fabric import Fabric
from fmlab.sim.ledger import Ledger, activation_steps, state_bytes
from fmlab.sim.program import Pass, Program
from fmlab.sim.replay import Replay
from fmlab.sim.schedule import Action
from fmlab.sim.step import Step
from fmlab.sim.usage import Usage

CONVENTIONS = ("full-attention", "6ND")


@dataclass(frozen=True)
class Operation:
    """All calls of one operator or message in a step of one rank: seconds, calls, FLOPs, bytes."""

    name: str
    seconds: float
    calls: int
    flops: int
    bytes: int


@dataclass(frozen=True, repr=False)
class DryRun:
    """One modelled training step.

    program:  what was traced; actions: the schedule of each stage; fabric: what priced the messages
    step, replay: tasks, and when they ran
    usages:   where the time of each replayed rank goes; ledgers: the memory of each stage's worst rank
    notes:    what was assumed; wall_seconds: how long the dry run itself took (measured)
    """

    program: Program
    chip: Chip
    where: str
    rates: str
    execution: str
    global_batch: int
    actions: Sequence[Sequence[Action]]
    fabric: Fabric | None
    step: Step
    replay: Replay
    usages: tuple[Usage, ...]
    ledgers: tuple[Ledger, ...]
    notes: tuple[str, ...] = ()
    wall_seconds: float = 0.0

    def __repr__(self) -> str:
        """The first line alone: a trace has megabytes of text."""
        return f"<DryRun: {str(self).splitlines()[0]}, step {self.seconds:.3g} s>"

    # ---- speed -------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.replay.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all chips together."""
        return self.global_batch * self.program.seq_len / self.seconds

    def model_flops(self, convention: str = "full-attention") -> float:
        """FLOPs that the mathematics of a step asks for, over all chips; recompute is never counted.

        "full-attention": matrix products and attention, forward and twice that backward, every pair of
        positions, output logits included, embedding look-ups not (Korthikanti et al. 2022, eq. 7).
        "6ND": 6 x parameters x tokens, no attention.
        """
        if convention == "6ND":
            return 6.0 * self.program.parameters * self.global_batch * self.program.seq_len
        if convention != "full-attention":
            raise ValueError(f"FLOP convention {convention!r} is unknown; legal: {', '.join(CONVENTIONS)}")
        split = self.program.split
        traces = [trace for chunk in self.program.chunks for trace in chunk.traces]
        rank = sum(trace.forward.model_flops + trace.later.model_flops for trace in traces)
        return float(rank * split.tensor * split.micro_batches * split.data)

    @cached_property
    def hardware_flops(self) -> float:
        """FLOPs that the chips execute, recompute and fused attention's second scores included."""
        split = self.program.split
        total = 0
        for chunk in self.program.chunks:
            for trace in chunk.traces:
                total += trace.first.flops + (split.micro_batches - 1) * trace.later.flops
                total += split.micro_batches * trace.forward.flops
        return float(total * split.tensor * split.data)

    def utilisation(self, convention: str = "full-attention") -> float:
        """Model FLOPs a second over the published peak of all chips (MFU)."""
        return self.model_flops(convention) / self.seconds / self._peak

    @property
    def hardware_utilisation(self) -> float:
        """Executed FLOPs a second over the published peak of all chips (HFU)."""
        return self.hardware_flops / self.seconds / self._peak

    @property
    def _peak(self) -> float:
        return self.chip.peak_flops(self.program.split.precision) * self.program.split.world_size

    @property
    def bubble(self) -> float:
        """Idle share of the step, mean over the replayed ranks."""
        return sum(one.bubble for one in self.usages) / len(self.usages) / self.seconds

    @property
    def exposed_communication(self) -> float:
        """Share of the step in which computing waits for messages, mean over the replayed ranks."""
        return sum(one.communication for one in self.usages) / len(self.usages) / self.seconds

    # ---- memory ------------------------------------------------------------------------------------------

    @property
    def fits(self) -> bool | None:
        """Whether every stage fits its chip; None if the chip's memory is not known."""
        answers = [one.fits for one in self.ledgers]
        return None if None in answers else all(answers)

    @property
    def peak_memory(self) -> int:
        """Bytes on the fullest rank."""
        return max(one.total for one in self.ledgers)

    def memory_over_time(self, stage: int = 0) -> list[tuple[float, int]]:
        """(seconds, bytes) of a stage's first rank: before, at the worst moment of, and after each action."""
        split = self.program.split
        base = sum(state_bytes(self.program.numel(stage), split).values())
        extra = self.ledgers[stage].lines
        base += extra.get("gathered parameters", 0) + extra.get("gradients in flight", 0)
        spans = self._spans(split.rank(stage))
        points = [(0.0, base)]
        for one in activation_steps(self.program, stage, self.actions[stage]):
            start, end = spans[one.action]
            points += [
                (start, base + one.before),
                ((start + end) / 2, base + one.most),
                (end, base + one.after),
            ]
        return [*points, (self.seconds, base)]

    def _spans(self, rank: int) -> dict[Action, tuple[float, float]]:
        """When a rank's actions began and ended."""
        spans: dict[Action, tuple[float, float]] = {}
        for i in self.replay.on((rank, "compute")):
            if i in self.step.parts:
                action = self.step.parts[i].action
                start = spans[action][0] if action in spans else self.replay.starts[i]
                spans[action] = (start, self.replay.ends[i])
        return spans

    # ---- operations --------------------------------------------------------------------------------------

    def top_operations(self, count: int = 10, stage: int | None = None) -> list[Operation]:
        """The operators and messages that take most of a rank's step (default: of the busiest stage)."""
        if stage is None:
            stage = max(range(len(self.ledgers)), key=lambda s: self._busy(self.program.split.rank(s)))
        seconds: defaultdict[str, float] = defaultdict(float)
        calls: Counter[str] = Counter()
        flops: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        rank = self.program.split.rank(stage)
        times: Counter[int] = Counter()
        passes: dict[int, Pass] = {}
        for i in self.replay.on((rank, "compute")):
            if i not in self.step.parts:
                task = self.replay.tasks[i]
                seconds[task.name] += task.seconds
                calls[task.name] += 1
                continue
            part = self.step.parts[i]
            seconds["messages of the tensor group"] += part.talking
            for one in part.passes:
                times[id(one)] += 1
                passes[id(one)] = one
        for key, number in times.items():
            for event in passes[key].events:
                name = event.name if event.kind != "collective" else "messages of the tensor group"
                seconds[name] += number * event.seconds
                calls[name] += number
                flops[name] += number * event.flops
                moved[name] += number * event.bytes
        return [
            Operation(name, value, calls[name], flops[name], moved[name])
            for name, value in sorted(seconds.items(), key=lambda item: -item[1])[:count]
            if value > 0
        ]

    def message_seconds(self, stage: int, event: Event) -> float:
        """Modelled seconds of one message of a stage's tensor group."""
        if self.fabric is None:
            return 0.0
        split = self.program.split
        group, beside = split.tensor_group(stage), split.other_tensor_groups(stage)
        return self.fabric.collective(event.collective, event.payload_bytes, group, beside)

    def _busy(self, rank: int) -> float:
        return self.replay.busy((rank, "compute"))

    # ---- words -------------------------------------------------------------------------------------------

    def save_trace(self, path: str | Path, **options: Any) -> Path:
        """Write the timeline as a trace for ui.perfetto.dev; options: see fmlab.sim.timeline.step_events."""
        from fmlab.sim.timeline import save, step_events

        return save(step_events(self, **options), path)

    def __str__(self) -> str:
        from fmlab.sim.tables import summary

        return summary(self)
