"""Schedulers: how a sample goes from noise to image, given a model that predicts one from the other."""

from fmlab.models.diffusion.schedulers.base import Scheduler, Steps, Threshold, denoise
from fmlab.models.diffusion.schedulers.ddim import DDIM
from fmlab.models.diffusion.schedulers.ddpm import DDPM
from fmlab.models.diffusion.schedulers.dpm_solver import DPMSolver2M
from fmlab.models.diffusion.schedulers.euler import Euler

__all__ = ["DDIM", "DDPM", "DPMSolver2M", "Euler", "Scheduler", "Steps", "Threshold", "denoise"]
