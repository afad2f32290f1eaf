"""DDPM: draw the sample at the next level from the posterior given the predicted image (Ho et al. 2020)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fmlab.models.diffusion.prediction import clean_from
from fmlab.models.diffusion.schedulers.base import Scheduler, Steps, Threshold

_VARIANCES = ("fixed_small", "fixed_large")


@dataclass(frozen=True)
class DDPM(Scheduler):
    """Ancestral sampling; arXiv:2006.11239, equations 6 and 7, algorithm 2, where a step may go to any
    later level.

    clip:      limit of the predicted image's values, for pixels in [-1, 1]; None for latents
    threshold: dynamic thresholding instead of clip
    variance:  of the noise that is added: "fixed_small", the posterior's, or "fixed_large", beta itself

    The last step adds no noise, as in algorithm 2.
    """

    THEIRS: ClassVar[str] = "DDPMScheduler"
    stochastic: ClassVar[bool] = True

    clip: float | None = None
    threshold: Threshold | None = None
    variance: str = "fixed_small"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self.clip, self.threshold)
        if self.variance not in _VARIANCES:
            raise ValueError(f"variance must be one of {', '.join(_VARIANCES)}, got {self.variance!r}")
        if self.final != "clean":
            raise ValueError("DDPM always ends at the clean image; leave final out")

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
        clean = limited(clean, self.clip, self.threshold)
        beta = 1 - before / after  # of the whole stride
        # The posterior of x at `after`, given x at `before` and the image, is normal with this mean.
        mean = (
            math.sqrt(after) * beta / (1 - before) * clean
            + math.sqrt(before / after) * (1 - after) / (1 - before) * sample
        )
        if i == len(steps) - 1:
            return mean, None
        if noise is None:
            raise ValueError("DDPM adds noise at each step but the last; pass noise")
        variance = beta if self.variance == "fixed_large" else (1 - after) / (1 - before) * beta
        return mean + math.sqrt(variance) * noise, None

    def to_fields(self) -> dict[str, Any]:
        return (
            super().to_fields() | limit_fields(self.clip, self.threshold) | {"variance_type": self.variance}
        )

    @classmethod
    def _own_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return limits_from(fields) | {"variance": fields.get("variance_type", "fixed_small")}


def limited(clean: Tensor, clip: float | None, threshold: Threshold | None) -> Tensor:
    """The predicted image with its values limited, if asked for."""
    if threshold is not None:
        return threshold(clean)
    return clean if clip is None else clean.clamp(-clip, clip)


def check_limits(clip: float | None, threshold: Threshold | None) -> None:
    """Raise ValueError for a limit that is no limit, or two at once."""
    if clip is not None and threshold is not None:
        raise ValueError("clip and threshold both limit the predicted image; give one of them")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")


def limit_fields(clip: float | None, threshold: Threshold | None) -> dict[str, Any]:
    """diffusers' fields for clip and threshold."""
    fields: dict[str, Any] = dict(clip_sample=clip is not None, thresholding=threshold is not None)
    if clip is not None:
        fields |= dict(clip_sample_range=clip)
    return fields | threshold_fields(threshold)


def threshold_fields(threshold: Threshold | None) -> dict[str, Any]:
    """diffusers' fields for thresholding that is on."""
    if threshold is None:
        return {}
    return dict(dynamic_thresholding_ratio=threshold.quantile, sample_max_value=threshold.most)


def limits_from(fields: dict[str, Any]) -> dict[str, Any]:
    """clip and threshold from diffusers' fields; thresholding goes before clipping, as there."""
    threshold = threshold_from(fields)
    clip = fields.get("clip_sample_range", 1.0) if fields.get("clip_sample", True) else None
    return dict(threshold=threshold, clip=None if threshold is not None else clip)


def threshold_from(fields: dict[str, Any]) -> Threshold | None:
    """threshold from diffusers' fields."""
    if not fields.get("thresholding", False):
        return None
    return Threshold(fields.get("dynamic_thresholding_ratio", 0.995), fields.get("sample_max_value", 1.0))
