"""DDIM: the predicted image and the predicted noise, mixed anew at the next level (Song et al. 2021)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fmlab.models.diffusion.prediction import clean_from, noise_from
from fmlab.models.diffusion.schedulers.base import Scheduler, Steps, Threshold
from fmlab.models.diffusion.schedulers.ddpm import check_limits, limit_fields, limited, limits_from

_STRIDES = ("next", "constant")


@dataclass(frozen=True)
class DDIM(Scheduler):
    """arXiv:2010.02502, equations 12 and 16. Deterministic with eta = 0; with eta = 1 it is DDPM.

    eta:       share of DDPM's noise that each step adds
    clip, threshold: as in DDPM
    rederive:  work out the noise again from the limited image, so that the two still make up the sample
               (Dhariwal & Nichol's code does; diffusers only with use_clipped_model_output)
    stride:    where a step ends. "next": at the level of the next timestep visited, as in the paper.
               "constant": T // n timesteps further, as in diffusers. They differ where the visited timesteps
               are not T // n apart (linspace; trailing, where n does not divide T): then the model is asked
               about another noise level than the sample has.
    """

    THEIRS: ClassVar[str] = "DDIMScheduler"

    eta: float = 0.0
    clip: float | None = None
    threshold: Threshold | None = None
    rederive: bool = False
    stride: str = "next"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.clip, self.threshold)
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must be in [0, 1], got {self.eta}")
        if self.stride not in _STRIDES:
            raise ValueError(f"stride must be one of {', '.join(_STRIDES)}, got {self.stride!r}")
        if self.rederive and self.clip is None and self.threshold is None:
            raise ValueError("rederive does nothing without clip or threshold; leave it out")

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        """Whether steps add noise."""
        return self.eta > 0

    def steps(self, count: int) -> Steps:
        steps = super().steps(count)
        if self.stride == "next":
            return steps
        ends = [int(t) - self.schedule.steps // count for t in steps.timesteps]
        table = self.schedule.alphas_cumprod
        after = [float(table[end]) if end >= 0 else self.final_abar for end in ends]
        return Steps(steps.timesteps, steps.before, tuple(after))

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
        clean = limited(clean_from(self.prediction, output, sample, before), self.clip, self.threshold)
        if self.rederive:
            direction = noise_from("x0", clean, sample, before)
        else:
            direction = noise_from(self.prediction, output, sample, before)
        variance = self.eta**2 * (1 - after) / (1 - before) * (1 - before / after)
        # What is not fresh noise keeps pointing along the predicted noise, so that 1 - after is the total.
        mean = math.sqrt(after) * clean + math.sqrt(max(1 - after - variance, 0.0)) * direction
        if not self.eta:
            return mean, None
        if noise is None:
            raise ValueError("DDIM with eta > 0 adds noise at each step; pass noise")
        return mean + math.sqrt(variance) * noise, None

    def to_fields(self) -> dict[str, Any]:
        own = limit_fields(self.clip, self.threshold) | {"set_alpha_to_one": self.final == "clean"}
        return super().to_fields() | own

    @classmethod
    def _own_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return limits_from(fields) | {"final": "clean" if fields.get("set_alpha_to_one", True) else "first"}
