"""What attention is, written down: the whole table of weights, then the mixture.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1. Every other core is tested against this one.

Shapes: b batch, h query heads, g key/value heads (a divisor of h), q queries, s keys, k head width.
"""

import torch
from torch import Tensor

from fmlab.models.attention.mask import AttentionMask
from fmlab.models.dropout import drop_out


def quadratic_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention with its weights [b,h,q,s] held in full, in the dtype of the inputs; see AttentionCore."""
    shared = query.shape[1] // key.shape[1]  # query heads i*shared..(i+1)*shared-1 use key/value head i
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores_bhqs = scale * (query @ key.transpose(-1, -2))
    if bias is not None:
        scores_bhqs = scores_bhqs + bias.to(scores_bhqs.dtype)
    hidden = ~mask.allowed(query.device)
    # The lowest finite number, because a row of -inf would be 0/0. Such a row sees nothing: all weights 0.
    lowest = torch.finfo(scores_bhqs.dtype).min
    weights_bhqs = scores_bhqs.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0)
    return drop_out(weights_bhqs, dropout, True, "bhqs") @ value


def definition_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`quadratic_core` in float64, rounded to the dtype of `query` at the end; see AttentionCore."""
    bias = None if bias is None else bias.double()
    mixed = quadratic_core(
        query.double(), key.double(), value.double(), mask, dropout, scale=scale, bias=bias
    )
    return mixed.to(query.dtype)
