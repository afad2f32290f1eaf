"""What strategies are given to work on, and what they leave behind for the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fmlab.backends import Backend
from fmlab.models.plan import ParallelPlan
from fmlab.parallel.layout import Batch, Layout
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.mesh import Mesh

BatchStep = Callable[[Batch], Batch]


@dataclass
class Build:
    """An engine under construction.

    model:        changed in place by each strategy; `ledger` says what became of its parameters
    plan:         the model's own declaration; strategies read it and never test for a class
    batch_steps:  what is done to each micro-batch after its targets were counted and before the forward pass
                  (a context-parallel rank takes its part of every sequence)
    before_step:  called with the number of the step before it begins
    at_close:     called when the engine lets go of the model, the last first
    objective:    what the model is trained for
    initial:      for a model built on the meta device: gives the first value of each parameter by name
    """

    model: nn.Module
    layout: Layout
    mesh: Mesh
    plan: ParallelPlan | None
    ledger: Ledger
    backend: Backend
    batch_steps: list[BatchStep] = field(default_factory=list)
    before_step: list[Callable[[int], None]] = field(default_factory=list)
    at_close: list[Callable[[], None]] = field(default_factory=list)
    objective: Any = None
    initial: Callable[[str], Tensor] | None = None

    def need_plan(self, why: str) -> ParallelPlan:
        """The plan. Raises ValueError for a model without one."""
        if self.plan is None:
            raise ValueError(
                f"{why} reads from the model's parallel plan how its matrices may be divided, and "
                f"{type(self.model).__name__} has none: give it a method parallel_plan() that returns an "
                "fmlab.models.plan.ParallelPlan, and prove it with check_plan; "
                "fmlab.models.draft_plan(model) drafts one"
            )
        return self.plan
