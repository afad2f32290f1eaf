"""A panel on pipeline schedules, and a model whose passes take a given time, to see schedules on real ranks.

Processes that share a few cores cannot show how long passes of a pipeline would take on a chip each. Passes
that only wait can: processes, messages and autograd are real, and the arithmetic is replaced by its duration.
"""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.lab.panels import Panel, choices
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block, State
from fmlab.objectives.terms import LossTerms, Term
from fmlab.sim.schedule import bubble_formula, most_in_flight, replay_schedule, schedule

NAMES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "interleaved": ("interleaved", 2),
    "ZB-H1": ("zb-h1", 1),
    "ZBV": ("zbv", 2),
}


# ---- panel -------------------------------------------------------------------------------------------------


def _draw(name: str, stages: int, micro_batches: int) -> tuple[Any, str]:
    from fmlab.lab.timeline import gantt, schedule_rows

    kind, chunks = NAMES[name]
    asked = micro_batches
    if kind == "interleaved":  # whole groups only
        micro_batches = -(-micro_batches // stages) * stages
    actions = schedule(kind, stages, micro_batches, chunks)
    result = replay_schedule(actions, kind=kind)
    held = [most_in_flight(todo) / chunks for todo in actions]
    rows = [
        (f"{row}: {most:g} held", bars, thin)
        for (row, bars, thin), most in zip(schedule_rows(result), held, strict=True)
    ]
    fig = gantt(rows, 0.0, result.seconds, "forward passes")
    rounded = f" (asked: {asked})" if asked != micro_batches else ""
    return fig, (
        f"{name}, {stages} stages, {_some(micro_batches)}{rounded}: {result.seconds:g} forward passes "
        f"long, bubble {1 - 3 * micro_batches / result.seconds:.1%}, a stage holds at most {_some(max(held))}"
    )


def _some(number: float) -> str:
    return f"{number:g} micro-batch{'es' * (number != 1)}"


def schedule_panel() -> Panel:
    """A panel with sliders for schedule, stages and micro-batches; all its figures are modelled.

    A backward pass takes twice as long as a forward pass, half of it for the gradients of weights. Worth
    finding: more micro-batches shrink every bubble but ZBV's, which is small at once; GPipe alone pays for
    them in memory; with one micro-batch no schedule helps.
    """
    return Panel(
        "Which schedule keeps the stages busy, and what does a stage hold meanwhile?",
        _draw,
        kind="modelled",
        name=choices("1F1B", list(NAMES), "schedule"),
        stages=choices(4, (2, 3, 4, 6, 8), "stages"),
        micro_batches=choices(8, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), "micro-batches"),
    )


def bubble_of(name: str, stages: int, micro_batches: int) -> float:
    """The bubble by formula, of a schedule by its name in NAMES."""
    kind, chunks = NAMES[name]
    return bubble_formula(stages, micro_batches, chunks, kind)


# ---- passes that take a given time -------------------------------------------------------------------------


class _PauseForwardPauseBackward(torch.autograd.Function):
    """Forward: nothing, for some time. Backward: nothing, for some time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Begin(Block):
    """x -> hidden, with a learned shift, so that the backward pass has somewhere to end."""

    reads, writes = ("x",), ("hidden",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, state: State) -> State:
        return state.updated(hidden=state.x + self.shift)


class Paced(Block):
    """hidden -> hidden: a small matrix, and pauses for each of the three passes."""

    reads = writes = ("hidden",)

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, state: State) -> State:
        weight = self.weight + 0  # its gradient goes through here, on no way to an input
        weight.register_hook(lambda _: time.sleep(self.seconds))
        x = _PauseForwardPauseBackward.apply(state.hidden, self.seconds, self.seconds)
        return state.updated(hidden=F.linear(x, weight))


class PacedModel(nn.Module):
    """`layers` blocks whose forward pass, gradient of inputs and gradient of weights take `seconds` each."""

    def __init__(self, layers: int, seconds: float, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Begin(width), *(Paced(width, seconds) for _ in range(layers))])

    def prepare(self, x: Tensor) -> State:
        return State(x=x)

    def forward(self, x: Tensor) -> State:
        state = self.prepare(x)
        for block in self.blocks:
            state = block(state)
        return state

    def parallel_plan(self) -> ParallelPlan:
        rule = Rule(r".*", "replicate")
        return ParallelPlan((rule,), tied=(), cuts=tuple(range(1, len(self.blocks))))


class PacedObjective:
    """The sum of what comes out: something to take the gradient of. Each row is a target."""

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> LossTerms:
        return {"sum": Term(sum=model(**batch)["hidden"].sum(), count=self.counts(batch)["sum"])}

    def counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": torch.tensor(len(batch["x"]))}
