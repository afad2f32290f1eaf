"""DPM-Solver++ 2M: a second-order step that also uses the image predicted one step before (Lu et al. 2022).

In lambda = log(sqrt(abar) / sqrt(1 - abar)) = -log sigma the probability-flow equation is solved exactly but
for the predicted image, which is taken as constant over the step (first order, = DDIM) or as the line through
the last two predictions (second order). The model runs once a step, as for first order.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fmlab.models.diffusion.prediction import clean_from
from fmlab.models.diffusion.schedulers.base import Scheduler, Steps, Threshold, check_count, checked_timesteps
from fmlab.models.diffusion.schedulers.ddpm import threshold_fields, threshold_from
from fmlab.models.diffusion.schedulers.levels import (
    final_fields,
    final_from,
    refuse_unknown,
    sigma_of,
    sigma_steps,
)

_FEW_STEPS = 15  # below this the last step is of first order, which is steadier


@dataclass(frozen=True)
class DPMSolver2M(Scheduler):
    """arXiv:2211.01095, algorithm 2; diffusers' DPMSolverMultistepScheduler with its defaults (midpoint).

    The first step has no memory and the step to abar = 1 an infinite lambda: both are of first order. With
    final="first" and fewer than 15 steps the last one is, too.
    Leading and linspace timesteps are those of one step more, without the last: this method need not visit 0.
    """

    THEIRS: ClassVar[str] = "DPMSolverMultistepScheduler"
    THEIR_SPACING: ClassVar[str] = "linspace"

    threshold: Threshold | None = None

    def timesteps(self, count: int) -> list[float]:
        total = self.schedule.steps
        if self.spacing == "trailing":
            return super().timesteps(count)
        check_count(count, total - 1)
        if self.spacing == "leading":
            values: Any = np.arange(1, count + 1)[::-1] * (total // (count + 1)) + self.offset
        else:
            values = np.round(np.linspace(0, total - 1, count + 1))[:0:-1]
        return checked_timesteps(values, total)

    def steps(self, count: int) -> Steps:
        return sigma_steps(self.schedule, self.timesteps(count), self.final_abar)

    def step(
        self,
        output: Tensor,
        sample: Tensor,
        steps: Steps,
        i: int,
        memory: Any = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        before, after = steps.before[i], steps.after[i]
        clean = clean_from(self.prediction, output, sample, before)
        if self.threshold is not None:
            clean = self.threshold(clean)
        estimate = (
            clean if memory is None or self._first_order(steps, i) else self._line(clean, memory, steps, i)
        )
        shrink = sigma_of(after) / sigma_of(before)  # exp(-h), with h the step in lambda
        moved = math.sqrt((1 - after) / (1 - before)) * sample + math.sqrt(after) * (1 - shrink) * estimate
        return moved, clean

    def _first_order(self, steps: Steps, i: int) -> bool:
        last = i == len(steps) - 1
        return last and (self.final == "clean" or len(steps) < _FEW_STEPS)

    @staticmethod
    def _line(clean: Tensor, previous: Tensor, steps: Steps, i: int) -> Tensor:
        """The predicted image half a step ahead, on the line through this prediction and the one before."""
        ahead = math.log(sigma_of(steps.before[i]) / sigma_of(steps.after[i]))
        behind = math.log(sigma_of(steps.before[i - 1]) / sigma_of(steps.before[i]))
        return clean + 0.5 * ahead / behind * (clean - previous)

    def to_fields(self) -> dict[str, Any]:
        own = dict(algorithm_type="dpmsolver++", solver_order=2, solver_type="midpoint")
        limits = dict(thresholding=self.threshold is not None) | threshold_fields(self.threshold)
        return super().to_fields() | own | final_fields(self.final) | limits

    @classmethod
    def _own_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        refuse_unknown(
            fields,
            algorithm_type="dpmsolver++",
            solver_order=2,
            solver_type="midpoint",
            lower_order_final=True,
            euler_at_final=False,
            use_karras_sigmas=False,
            use_exponential_sigmas=False,
            use_beta_sigmas=False,
            use_lu_lambdas=False,
            use_flow_sigmas=False,
            use_dynamic_shifting=False,
            lambda_min_clipped=-math.inf,
            variance_type=None,
        )
        return final_from(fields) | {"threshold": threshold_from(fields)}
