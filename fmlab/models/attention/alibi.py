"""ALiBi: no position vectors, but a penalty that grows with distance, steeper in some heads than in others.

Press, Smith and Lewis 2022, arXiv:2108.12409, section 3; slopes of head counts that are not powers of two as
in the paper's code.

Shapes: h heads, q queries, s keys.
"""

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> Tensor:
    """Slope of each head, fp32 [h]: 2^(-8/h), 2^(-16/h), ... 2^-8 for a power of two.

    Other counts take the slopes of the power of two below, then every second one of the power above.
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    below = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    slopes += [2 ** (-8 * i / (2 * below)) for i in range(1, 2 * (heads - below) + 1, 2)]
    return torch.tensor(slopes)


def alibi_bias(slopes: Tensor, queries: int, keys: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The bias of an attention core, -slope * |distance|, [1,h,q,s].

    Args:
        slopes: [h], of the heads at hand (a rank's share of alibi_slopes(all heads)).
        queries, keys: with more keys than queries (a cache) they are aligned at the end.

    Only distances count, so neither padding nor packed documents change it.
    """
    query = torch.arange(keys - queries, keys, device=slopes.device)
    distance = (torch.arange(keys, device=slopes.device) - query[:, None]).abs()
    return (-slopes[:, None, None] * distance)[None].to(dtype)
