"""Diffusion models: noise schedule, schedulers, guidance, networks and the text-to-image pipeline."""

from fmlab.models.diffusion.autoencoder import AutoencoderConfig, AutoencoderKL
from fmlab.models.diffusion.dit import DiT, DiTConfig
from fmlab.models.diffusion.gaussian import DiagonalGaussian
from fmlab.models.diffusion.unet import UNet, UNetConfig

__all__ = ["AutoencoderConfig", "AutoencoderKL", "DiT", "DiTConfig", "DiagonalGaussian", "UNet", "UNetConfig"]
