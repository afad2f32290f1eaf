"""Sinusoidal positions: a fixed vector of sines and cosines of falling frequency for each position.

Vaswani et al. 2017, arXiv:1706.03762, section 3.5. The vector of position p+n is a rotation, the same for
every p, of the vector of position p.
"""

import torch
from torch import Tensor


def sinusoidal_positions(
    positions: Tensor,
    width: int,
    base: float = 10000.0,
    interleaved: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Vectors [..., width] of `positions` [...]: sin(p * base^(-2i/width)) and cos of the same.

    Args:
        positions: whole or real numbers of any shape.
        interleaved: sine i in column 2i and cosine i in column 2i+1, as the paper writes it; False puts all
            sines before all cosines, as the paper's code and most later ones do.

    Angles are made in float64: at fp32 those of position 100,000 are wrong in the third digit. Raises
    ValueError if width is odd.
    """
    if width < 2 or width % 2:
        raise ValueError(f"width must be even and at least 2, got {width}: sines and cosines come in pairs")
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    angle = positions.double()[..., None] * base**-exponent
    pairs = (angle.sin(), angle.cos())
    joined = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return joined.to(dtype)
