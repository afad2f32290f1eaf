"""What a diffusion model predicts: the noise (epsilon), the clean image (x0) or the velocity (v).

With signal a = sqrt(abar) and noise level s = sqrt(1 - abar), so that a^2 + s^2 = 1,

    x_t = a * x_0 + s * noise        v = a * noise - s * x_0        (Salimans & Ho 2022, arXiv:2202.00512, §4)

x_t and v are x_0 and the noise, turned by one angle: any two of the four give the others. So the three
targets differ only in the weight that each timestep gets in the loss, and in what is lost where a or s is 0:
where a = 0 (zero terminal SNR) x_t is the noise, and predicting it says nothing about the image.

Shapes: every tensor [b, ...]; `abar` is float64 and broadcasts ([b, 1, 1, 1]) or is a Python float.
"""

import math

import torch
from torch import Tensor

from fmlab.models.diffusion.schedule import NoiseSchedule

PREDICTIONS = ("epsilon", "v", "x0")
#: Their names in diffusers' scheduler_config.json.
THEIR_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}

Level = Tensor | float


def check_prediction(schedule: NoiseSchedule, prediction: str) -> None:
    """Raise ValueError for an unknown prediction, and for epsilon where the last timestep has no signal."""
    if prediction not in PREDICTIONS:
        raise ValueError(f"unknown prediction {prediction!r}; legal: {', '.join(PREDICTIONS)}")
    if prediction == "epsilon" and schedule.zero_terminal_snr:
        raise ValueError(
            "zero terminal SNR cannot go with epsilon prediction: at the last timestep x_t is the noise "
            'itself, so a perfect prediction of it says nothing about the image; use prediction="v" (or "x0")'
        )


def target(prediction: str, clean: Tensor, noise: Tensor, abar: Level) -> Tensor:
    """What the model shall predict, from x_0 and the noise."""
    if prediction == "epsilon":
        return noise
    if prediction == "x0":
        return clean
    signal, level = _roots(abar, clean)
    return signal * noise - level * clean


def clean_from(prediction: str, output: Tensor, sample: Tensor, abar: Level) -> Tensor:
    """x_0 from a prediction at x_t = `sample`."""
    signal, level = _roots(abar, sample)
    if prediction == "epsilon":
        return (sample - level * output) / signal
    if prediction == "x0":
        return output
    return signal * sample - level * output


def noise_from(prediction: str, output: Tensor, sample: Tensor, abar: Level) -> Tensor:
    """The noise from a prediction at x_t = `sample`."""
    signal, level = _roots(abar, sample)
    if prediction == "epsilon":
        return output
    if prediction == "x0":
        return (sample - signal * output) / level
    return level * sample + signal * output


def velocity_from(prediction: str, output: Tensor, sample: Tensor, abar: Level) -> Tensor:
    """v from a prediction at x_t = `sample`."""
    if prediction == "v":
        return output
    clean = clean_from(prediction, output, sample, abar)
    noise = noise_from(prediction, output, sample, abar)
    return target("v", clean, noise, abar)


def min_snr_weight(prediction: str, abar: Tensor, gamma: float = 5.0) -> Tensor:
    """Weight of each timestep in the loss, min-SNR-gamma (Hang et al. 2023, arXiv:2303.09556, §3.4).

    The x0 loss weighted by min(SNR, gamma), written for what is predicted: an epsilon loss already weighs
    x0's by SNR, a v loss by SNR + 1, so those are divided out.

        x0: min(SNR, gamma)      epsilon: min(SNR, gamma) / SNR      v: min(SNR, gamma) / (SNR + 1)

    `abar` float64, any shape; float64 comes back. Raises ValueError unless gamma > 0.
    """
    if gamma <= 0:
        raise ValueError(f"gamma of min-SNR must be positive, got {gamma}")
    snr = abar / (1 - abar)
    capped = snr.clamp(max=gamma)
    if prediction == "x0":
        return capped
    if prediction == "v":
        return capped / (snr + 1)
    return (gamma / snr).clamp(max=1)  # = capped / snr, and 1 where both are 0


def _roots(abar: Level, like: Tensor) -> tuple[Level, Level]:
    """Signal and noise level, in the dtype of `like`."""
    if isinstance(abar, Tensor):
        return torch.sqrt(abar).to(like.dtype), torch.sqrt(1 - abar).to(like.dtype)
    return math.sqrt(abar), math.sqrt(1 - abar)
