"""Euler's method on the probability-flow equation, in the coordinates of Karras et al. (2022).

The sample here is not x_t but x_t / sqrt(abar) = x_0 + sigma * noise: the image at full strength under noise
that shrinks from sigma = 14.6 (Stable Diffusion) to 0. In these coordinates the equation is

    d sample / d sigma = (sample - predicted x_0) / sigma        (arXiv:2206.00364, equation 3, sigma(t) = t)

Two conventions follow, and forgetting either gives grey images:

- `start`: the first sample is noise times sigma, not noise. (With leading spacing times sqrt(sigma^2 + 1),
  the size of a training sample at that level in these coordinates.)
- `model_input`: the model was trained on x_t, of unit variance, so it sees sample / sqrt(sigma^2 + 1).

A step equals DDIM's with eta = 0, exactly: only the coordinates differ.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fmlab.models.diffusion.prediction import clean_from
from fmlab.models.diffusion.schedulers.base import Scheduler, Steps, check_count
from fmlab.models.diffusion.schedulers.levels import (
    final_fields,
    final_from,
    refuse_unknown,
    sigma_of,
    sigma_steps,
)


@dataclass(frozen=True)
class Euler(Scheduler):
    """diffusers' EulerDiscreteScheduler without churn. Linspace timesteps are not rounded."""

    THEIRS: ClassVar[str] = "EulerDiscreteScheduler"
    THEIR_SPACING: ClassVar[str] = "linspace"

    def timesteps(self, count: int) -> list[float]:
        if self.spacing != "linspace":
            return super().timesteps(count)
        check_count(count, self.schedule.steps)
        # In float32, as diffusers has them: the model's time embedding sees these numbers.
        values = np.linspace(0, self.schedule.steps - 1, count, dtype=np.float32)[::-1]
        return [float(t) for t in values]

    def steps(self, count: int) -> Steps:
        return sigma_steps(self.schedule, self.timesteps(count), self.final_abar)

    def start(self, noise: Tensor, steps: Steps) -> Tensor:
        sigma = sigma_of(steps.before[0])
        return noise * (math.sqrt(sigma**2 + 1) if self.spacing == "leading" else sigma)

    def model_input(self, sample: Tensor, steps: Steps, i: int) -> Tensor:
        return sample * math.sqrt(steps.before[i])  # 1 / sqrt(sigma^2 + 1)

    def step(
        self,
        output: Tensor,
        sample: Tensor,
        steps: Steps,
        i: int,
        memory: Any = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        sigma, next_sigma = sigma_of(steps.before[i]), sigma_of(steps.after[i])
        clean = clean_from(self.prediction, output, self.model_input(sample, steps, i), steps.before[i])
        slope = (sample - clean) / sigma
        return sample + (next_sigma - sigma) * slope, None

    def to_fields(self) -> dict[str, Any]:
        return super().to_fields() | final_fields(self.final)

    @classmethod
    def _own_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        refuse_unknown(
            fields,
            interpolation_type="linear",
            use_karras_sigmas=False,
            use_exponential_sigmas=False,
            use_beta_sigmas=False,
            timestep_type="discrete",
        )
        return final_from(fields)
