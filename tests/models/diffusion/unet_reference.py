"""A small UNet beside diffusers' UNet2DConditionModel with the same random weights."""

import pytest
import torch
from torch import Tensor, nn

from fmlab.models.diffusion import UNet, UNetConfig
from fmlab.models.diffusion.unet_hf import to_hf_config, weights
from tests.models.reference import copy_weights, roughen

SMALL = dict(channels=(16, 24, 32), heads=(2, 2, 2), text_size=20, norm_groups=4, layers_per_level=2)
SHAPES = {
    "1.5": {},  # the same number of heads on each level, 1x1 convolutions around the transformers
    "2.1": dict(heads=(1, 2, 4), linear_projection=True),
    "plain": dict(attention=(False, False, True), layers_per_level=1, in_channels=9, out_channels=8),
}


def small_unet(shape: str = "1.5", **overrides: object) -> UNet:
    """A model none of whose parameters is 0 or 1: biases, norms and what starts at zero count."""
    torch.manual_seed(0)
    model = UNet(UNetConfig(**(SMALL | SHAPES[shape] | overrides)))  # type: ignore[arg-type]
    roughen(model)
    return model


def diffusers_twin(model: UNet) -> nn.Module:
    """diffusers' model with the weights of `model`."""
    diffusers = pytest.importorskip("diffusers")
    twin = diffusers.UNet2DConditionModel.from_config(to_hf_config(model.config))
    copy_weights(model, twin, weights(model.config))
    return twin


def batch(model: UNet, size: tuple[int, int] = (12, 20), rows: int = 2, tokens: int = 5) -> dict[str, Tensor]:
    """Arguments of `model`: a sample neither square nor a power of two, a timestep for each row."""
    generator = torch.Generator().manual_seed(3)
    dtype = next(model.parameters()).dtype
    return {
        "sample": torch.randn(rows, model.config.in_channels, *size, generator=generator).to(dtype),
        "timestep": torch.tensor([981, 3, 500, 0])[:rows],
        "encoder_hidden_states": torch.randn(rows, tokens, model.config.text_size, generator=generator).to(
            dtype
        ),
    }
