"""Diffusion models: noise schedule, schedulers, guidance, networks and the text-to-image pipeline."""

from fmlab.models.diffusion.autoencoder import AutoencoderConfig, AutoencoderKL
from fmlab.models.diffusion.dit import DiT, DiTConfig
from fmlab.models.diffusion.gaussian import DiagonalGaussian
from fmlab.models.diffusion.pipeline import StableDiffusion, to_uint8
from fmlab.models.diffusion.schedule import NoiseSchedule
from fmlab.models.diffusion.schedulers import DDIM, DDPM, DPMSolver2M, Euler, Scheduler, denoise
from fmlab.models.diffusion.unet import UNet
from fmlab.models.diffusion.unet_layout import UNetConfig

__all__ = [
    "DDIM",
    "DDPM",
    "AutoencoderConfig",
    "AutoencoderKL",
    "DPMSolver2M",
    "DiT",
    "DiTConfig",
    "DiagonalGaussian",
    "Euler",
    "NoiseSchedule",
    "Scheduler",
    "StableDiffusion",
    "UNet",
    "UNetConfig",
    "denoise",
    "to_uint8",
]
