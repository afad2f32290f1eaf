"""Levels as sigma, the noise per unit of image, for the two schedulers that solve an equation in it.

sigma = sqrt((1 - abar) / abar)          abar = 1 / (1 + sigma^2)
"""

import math
from typing import Any

import numpy as np

from fmlab.models.diffusion.schedule import NoiseSchedule
from fmlab.models.diffusion.schedulers.base import Steps

# A level without any image has an infinite sigma. diffusers puts the smallest 16-bit float for abar there
# (sigma 4096), and so do we: such a sample is noise for every purpose.
LEAST_ABAR = 2.0**-24


def sigma_of(abar: float) -> float:
    """sqrt((1 - abar) / abar)."""
    return math.sqrt((1 - abar) / abar)


def abar_of(sigma: float) -> float:
    """1 / (1 + sigma^2)."""
    return 1 / (1 + sigma * sigma)


def sigma_steps(schedule: NoiseSchedule, timesteps: list[float], final_abar: float) -> Steps:
    """Steps through these timesteps; sigma is interpolated linearly between whole ones."""
    table = schedule.alphas_cumprod.clone()
    if schedule.zero_terminal_snr:
        table[-1] = LEAST_ABAR
    sigmas = ((1 - table) / table).sqrt().numpy()
    before = [abar_of(float(s)) for s in np.interp(timesteps, np.arange(len(sigmas)), sigmas)]
    return Steps(tuple(timesteps), tuple(before), (*before[1:], final_abar))


def final_fields(final: str) -> dict[str, Any]:
    """diffusers' field for the level of the last step."""
    return dict(final_sigmas_type="zero" if final == "clean" else "sigma_min")


def final_from(fields: dict[str, Any]) -> dict[str, Any]:
    """Our setting from that field."""
    return dict(final="first" if fields.get("final_sigmas_type", "zero") == "sigma_min" else "clean")


def refuse_unknown(fields: dict[str, Any], **only: Any) -> None:
    """Raise ValueError if a setting that changes the result has another value than the one we compute."""
    for name, value in only.items():
        if fields.get(name) not in (None, value):
            raise ValueError(
                f"scheduler_config.json sets {name}={fields[name]!r}; only {value!r} is supported"
            )
