"""The whole way of a sample, in ours and in diffusers' schedulers, with one network and one noise."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fmlab.models.diffusion.schedulers import Scheduler, denoise

SHAPE = (2, 3, 6, 6)
_MIX = torch.randn(3, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 2


def network(sample: Tensor, timesteps: Tensor) -> Tensor:
    """A fixed, smooth, random function of the sample and the time."""
    time = torch.as_tensor(timesteps, dtype=sample.dtype).reshape(-1, 1, 1, 1) / 1000
    mixed = torch.einsum("bchw,cd->bdhw", sample, _MIX.to(sample.dtype))
    return torch.tanh(mixed + time) + 0.3 * sample.roll(1, -1)


def noise(index: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The first noise (-1) and that of each step, the same for both sides."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(SHAPE, generator=generator, dtype=dtype)


def our_way(scheduler: Scheduler, count: int, dtype: torch.dtype) -> list[Tensor]:
    samples: list[Tensor] = []
    denoise(
        network,
        scheduler,
        count,
        noise(-1, dtype),
        lambda i: noise(i, dtype),
        on_step=lambda i, sample: samples.append(sample),
    )
    return samples


def their_way(
    scheduler: Scheduler, count: int, dtype: torch.dtype, exact: bool, step: dict[str, Any], **fields: Any
) -> list[Tensor]:
    """diffusers' scheduler with our config (and more `fields`); `exact` gives it our float64 table of abar.

    Without `exact` it works with the table that it computes in float32.
    """
    diffusers = pytest.importorskip("diffusers")
    config = scheduler.to_fields()
    cls = getattr(diffusers, config.pop("_class_name"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = cls(**config | fields)
    if exact:
        table = scheduler.schedule.alphas_cumprod.clone()
        if "Euler" in cls.__name__ or "DPMSolver" in cls.__name__:
            table[-1] = max(float(table[-1]), 2.0**-24)
        theirs.alphas_cumprod = table
        if hasattr(theirs, "final_alpha_cumprod") and scheduler.final == "first":
            theirs.final_alpha_cumprod = table[0]
    theirs.set_timesteps(count)
    sample = noise(-1, dtype) * theirs.init_noise_sigma
    samples = []
    for i, t in enumerate(theirs.timesteps):
        output = network(theirs.scale_model_input(sample, t), t)
        if "generator" in step:
            step = step | {"generator": _Source(noise(i, dtype))}
        elif "variance_noise" in step:
            step = step | {"variance_noise": noise(i, dtype)}
        sample = _step(theirs, output, t, sample, step)
        samples.append(sample)
    return samples


class _Source:
    """Stands for a generator, so that DDPM draws the noise that we chose."""

    def __init__(self, value: Tensor):
        self.value = value


def _step(theirs: Any, output: Tensor, t: Tensor, sample: Tensor, step: dict[str, Any]) -> Tensor:
    source = step.get("generator")
    if source is None:
        return theirs.step(output, t, sample, **step).prev_sample
    from diffusers.schedulers import scheduling_ddpm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling_ddpm, "randn_tensor", lambda *args, **kwargs: source.value)
        return theirs.step(output, t, sample).prev_sample
