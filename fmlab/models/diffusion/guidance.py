"""Classifier-free guidance: step further away from what the model would draw without the caption.

    guided = without + scale * (with - without)                (Ho & Salimans 2022, arXiv:2207.12598)

scale 1 is the caption's own prediction, more follows the caption more closely (the paper's w is scale - 1).
Captions are dropped in training (see fmlab.objectives.Denoising), so that one model can do both.
"""

from collections.abc import Callable

import torch
from torch import Tensor

#: (sample [b, ...], timesteps [b], condition [b, ...]) -> prediction [b, ...]
ConditionalModel = Callable[[Tensor, Tensor, Tensor], Tensor]


def guide(without: Tensor, with_caption: Tensor, scale: float, rescale: float = 0.0) -> Tensor:
    """The guided prediction from the two, [b, ...] each.

    rescale: share, 0 to 1, of the guided prediction that is scaled back to the standard deviation, image by
        image, of the one with the caption: large scales overexpose (Lin et al. 2023, arXiv:2305.08891,
        section 3.4, uses 0.7).
    """
    guided = without + scale * (with_caption - without)
    if not rescale:
        return guided
    dims = list(range(1, guided.dim()))
    factor = with_caption.std(dims, keepdim=True) / guided.std(dims, keepdim=True)
    return rescale * (guided * factor) + (1 - rescale) * guided


def guided_predictor(
    model: ConditionalModel,
    condition: Tensor,
    empty: Tensor,
    scale: float,
    rescale: float = 0.0,
    one_batch: bool = True,
) -> Callable[[Tensor, Tensor], Tensor]:
    """(sample, timesteps) -> guided prediction, for fmlab.models.diffusion.schedulers.denoise.

    condition: [b, ...] of the captions; empty: the same shape, of the empty (or a negative) caption.
    one_batch: run both as one batch of 2b, or one after the other, which takes half the memory. With scale 1
        the model runs once, without `empty`.

    Raises ValueError for a scale or rescale that cannot be.
    """
    check_guidance(scale, rescale)
    if condition.shape != empty.shape:
        raise ValueError(
            f"condition {list(condition.shape)} and empty {list(empty.shape)} must have one shape"
        )

    def predict(sample: Tensor, timesteps: Tensor) -> Tensor:
        if scale == 1:
            return model(sample, timesteps, condition)
        if one_batch:
            both = model(
                torch.cat([sample, sample]), torch.cat([timesteps, timesteps]), torch.cat([empty, condition])
            )
            without, with_caption = both.chunk(2)
        else:
            without, with_caption = model(sample, timesteps, empty), model(sample, timesteps, condition)
        return guide(without, with_caption, scale, rescale)

    return predict


def check_guidance(scale: float, rescale: float = 0.0) -> None:
    """Raise ValueError for a negative scale, or a rescale that is no share or does nothing."""
    if not scale >= 0:
        raise ValueError(f"the guidance scale must be at least 0 (1: none, 7.5: usual), got {scale}")
    if not 0 <= rescale <= 1:
        raise ValueError(f"guidance rescale must be from 0 to 1, got {rescale}")
    if rescale and scale == 1:
        raise ValueError("guidance rescale does nothing at scale 1; leave it out")
