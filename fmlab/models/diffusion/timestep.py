"""The embedding of diffusion timesteps: waves of many lengths, then a small network.

Shapes: b batch, e width of the waves, t width of the embedding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.layers import Linear


def timestep_waves(timestep_b: Tensor, size: int, shift: float = 0.0) -> Tensor:
    """Cosines, then sines, of t * 10000^(-i / (size/2 - shift)) for i < size/2: fp32 [b,size].

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.5, with the cosines first, as Stable Diffusion and DiT
    have them. In fp32 whatever the model's dtype: a timestep of 999 has no place in 16 bits.

    Args:
        timestep_b: whole or fractional steps [b].
        size: even.
        shift: DDPM's code has 1, Stable Diffusion 0.
    """
    half = size // 2
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=timestep_b.device)
    angle_be = timestep_b.float()[:, None] * torch.exp(exponent / (half - shift))
    return torch.cat([angle_be.cos(), angle_be.sin()], -1)


class TimestepEmbedding(nn.Module):
    """timestep [b] -> [b,t]: waves, linear, SiLU, linear (Ho et al. 2020, arXiv:2006.11239, appendix B)."""

    def __init__(self, wave_size: int, time_size: int, shift: float = 0.0):
        super().__init__()
        self.wave_size, self.shift = wave_size, shift
        self.up = Linear(wave_size, time_size)
        self.down = Linear(time_size, time_size)

    def forward(self, timestep_b: Tensor) -> Tensor:
        waves_be = timestep_waves(timestep_b, self.wave_size, self.shift).to(self.up.weight.dtype)
        return self.down(F.silu(self.up(waves_be)))


def batch_of_timesteps(timestep: Tensor, batch: int) -> Tensor:
    """`timestep` as [b]: one for each image, or one for all. Raises ValueError for anything else."""
    if not isinstance(timestep, Tensor) or timestep.dtype == torch.bool or timestep.is_complex():
        got = timestep.dtype if isinstance(timestep, Tensor) else type(timestep).__name__
        raise ValueError(f"timestep must be a tensor of numbers, got {got}")
    if timestep.dim() > 1 or (timestep.dim() == 1 and timestep.shape[0] not in (1, batch)):
        raise ValueError(
            f"timestep must hold one number for each of the {batch} images, or one for all; "
            f"got shape {list(timestep.shape)}"
        )
    return timestep.reshape(-1).expand(batch)
