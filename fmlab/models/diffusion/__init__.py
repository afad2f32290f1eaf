"""Diffusion models: noise schedule, schedulers, guidance, networks and the text-to-image pipeline."""

from fmlab.models.diffusion.unet import UNet, UNetConfig

__all__ = ["UNet", "UNetConfig"]
