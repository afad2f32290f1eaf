"""The training step of a UNet with Stable Diffusion 1.5's shape at 0.3 of its width, beside diffusers'.

Levels, layers, heads, groups and text are those of 1.5; latents are 32x32 and the widths 96 to 384 instead of
320 to 1280, so that a step takes about a second on a laptop.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fmlab.extras import require
from fmlab.models import UNet
from fmlab.models.diffusion.unet_hf import to_hf_config

BATCH, SIDE, TOKENS, WIDTHS = 2, 32, 77, (96, 192, 384, 384)
NAME = f"UNet of Stable Diffusion 1.5's shape, 79M, step, batch {BATCH} x 4x{SIDE}x{SIDE}"
REFERENCE_IMPORTS = ("diffusers.models.unets.unet_2d_condition",)  # not counted as memory of a step


def _model(side: str) -> torch.nn.Module:
    """A side's model, `model(sample, timestep, encoder_hidden_states)` with a `.sample`."""
    torch.manual_seed(0)
    if side == "fmlab":
        return UNet.from_preset("sd-1.5", channels=WIDTHS)
    with torch.device("meta"):
        config = UNet.from_preset("sd-1.5", channels=WIDTHS).config
    reference = require("hf", "diffusers").UNet2DConditionModel
    return reference.from_config(to_hf_config(config)).train()


def make_step(side: str, precision: str) -> Callable[[], None]:
    """One training step of a side: noise predicted, mean squared error, backward, fused AdamW."""
    model = _model(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sample, noise = normal(BATCH, 4, SIDE, SIDE), normal(BATCH, 4, SIDE, SIDE)
    text = normal(BATCH, TOKENS, 768)
    timestep = torch.randint(0, 1000, (BATCH,), generator=generator)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            predicted = model(sample, timestep, text).sample
        loss = torch.nn.functional.mse_loss(predicted.float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
