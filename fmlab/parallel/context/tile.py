"""Attention of some queries to some of their keys, and how such parts are put together.

Softmax over all keys is not the sum of softmaxes over parts. But with the log-sum-exp of each part's scores
kept beside its result, the parts can be rescaled to one softmax afterwards, in any order (Milakov and
Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, section 3.1). The gradients of a part
need the log-sum-exp and the result of the whole row only.

Shapes: b batch, h query heads, g key/value heads, q queries, s keys, k head width, n = (h / g) * q.
"""

import torch
from torch import Tensor

from fmlab.models.functions import without_autocast

_NONE = -float("inf")
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    query: Tensor, key: Tensor, value: Tensor, diagonal: bool, allowed: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The mixed values [b,h,q,k] of one part and the log-sum-exp [b,h,q] of its scores, in fp32 or wider.

    diagonal: query i sees keys 0..i (q = s). allowed: bool [b or 1,1,q,s]. A query that sees nothing gives
    zeros and a log-sum-exp of -inf.
    """
    if _can_fuse(query, value):
        hidden = _added(allowed, query.dtype)
        mixed, logsumexp = _fused(query, key, value, 0.0, diagonal, attn_mask=hidden, scale=scale)
        if allowed is not None:
            logsumexp = logsumexp.masked_fill(~allowed.any(-1), _NONE)
        return mixed, logsumexp
    with without_autocast(query):
        scores = _scores(query, key, diagonal, allowed, scale)
        logsumexp = scores.logsumexp(-1)
        weights = (scores - logsumexp.masked_fill(logsumexp == _NONE, 0)[..., None]).exp()
        return _times(weights, value.to(weights.dtype)), logsumexp


# region merge
def merge_(mixed: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor) -> None:
    """Put one part more into a row's result so far, in place.

    exp(logsumexp) is the sum that a part's softmax was divided by, so each is weighted by its share of the
    new sum.
    """
    total = torch.logaddexp(logsumexp, part_logsumexp)
    safe = total.masked_fill(total == _NONE, 0)  # a row that has seen nothing yet stays 0
    mixed.mul_((logsumexp - safe).exp_()[..., None])
    mixed.add_(part * (part_logsumexp - safe).exp_()[..., None])
    logsumexp.copy_(total)


# endregion


def gradients(
    d_mixed: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    logsumexp: Tensor,
    diagonal: bool,
    allowed: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one part adds to the gradients of its query, key and value.

    mixed, logsumexp: of the whole rows, over all keys; +inf for a row that sees nothing, whose weights
    exp(score - inf) are then 0.
    """
    if _can_fuse(query, value):
        hidden = _added(allowed, query.dtype)
        saved = (mixed.contiguous(), logsumexp.contiguous())
        return tuple(
            _fused_backward(
                d_mixed.contiguous(), query, key, value, *saved, 0.0, diagonal, attn_mask=hidden, scale=scale
            )
        )
    with without_autocast(query):
        scores = _scores(query, key, diagonal, allowed, scale)
        exact = scores.dtype
        d_mixed = d_mixed.to(exact)
        weights = (scores - logsumexp[..., None]).exp()
        pull = (d_mixed * mixed).sum(-1, keepdim=True)
        d_scores = (_times(d_mixed, value.to(exact).mT) - pull) * weights * scale
        return (
            _times(d_scores, key.to(exact)),
            _gathered(d_scores, query.to(exact), key.shape[1]),
            _gathered(weights, d_mixed, key.shape[1]),
        )


def _can_fuse(query: Tensor, value: Tensor) -> bool:
    """Whether torch's flash kernel for CPUs applies: the only one of its kernels that takes log-sum-exps
    back."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and query.numel() > 0


def _added(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, _NONE)


def _scores(query: Tensor, key: Tensor, diagonal: bool, allowed: Tensor | None, scale: float) -> Tensor:
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = _times(query.to(exact), key.to(exact).mT) * scale
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, _NONE)
    return scores if allowed is None else scores.masked_fill(~allowed, _NONE)


def _times(left_bhqx: Tensor, right_bgxy: Tensor) -> Tensor:
    """The product [b,h,q,y] of each query head with its key/value head, which is shared, not copied."""
    b, h, q, x = left_bhqx.shape
    g = right_bgxy.shape[1]
    return (left_bhqx.reshape(b, g, h // g * q, x) @ right_bgxy).view(b, h, q, right_bgxy.shape[-1])


def _gathered(left_bhqs: Tensor, right_bhqx: Tensor, g: int) -> Tensor:
    """left^T right [b,g,s,x], summed over the query heads of each key/value head."""
    shared = left_bhqs.shape[1] // g
    left, right = (x.unflatten(1, (g, shared)).flatten(2, 3) for x in (left_bhqs, right_bhqx))
    return left.mT @ right
