"""Attention of some queries to some of their keys, and how such parts are put together.

Softmax over all keys is not the sum of softmaxes over parts. But with the log-sum-exp of each part's scores
kept beside its result, the parts can be rescaled to one softmax afterwards, in any order (Milakov and
Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, section 3.1). The gradients of a part
need the log-sum-exp and the result of the whole row only.

Shapes: b batch, h query heads, g key/value heads, q queries, s keys, k head width, n = (h / g) * q.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fmlab.models.functions import without_autocast

_NONE = -float("inf")
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Limits(NamedTuple):
    """What a part of attention leaves out.

    diagonal: query i sees keys 0..i only (q = s). allowed: bool [b or 1,1,q,s], or None for all. factors: of
    the weights, [b,h,q,s] (dropout), or None.
    """

    diagonal: bool = False
    allowed: Tensor | None = None
    factors: Tensor | None = None


ALL = Limits()


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, limits: Limits = ALL
) -> tuple[Tensor, Tensor]:
    """The mixed values [b,h,q,k] of one part and the log-sum-exp [b,h,q] of its scores, in fp32 or wider.

    A query that sees nothing gives zeros and a log-sum-exp of -inf.
    """
    allowed = limits.allowed
    if _can_fuse(query, value, limits):
        hidden = _added(allowed, query.dtype)
        mixed, logsumexp = _fused(query, key, value, 0.0, limits.diagonal, attn_mask=hidden, scale=scale)
        if allowed is not None:
            logsumexp = logsumexp.masked_fill(~allowed.any(-1), _NONE)
        return mixed, logsumexp
    with without_autocast(query):
        scores = _scores(query, key, scale, limits)
        logsumexp = scores.logsumexp(-1)
        weights = (scores - logsumexp.masked_fill(logsumexp == _NONE, 0)[..., None]).exp()
        weights = weights if limits.factors is None else weights * limits.factors
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
    mixed: Tensor,
    logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    limits: Limits = ALL,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one part adds to the gradients of its query, key and value.

    d_mixed, mixed, logsumexp: of the whole rows, over all keys; the last +inf for a row that sees nothing,
    whose weights exp(score - inf) are then 0.
    """
    if _can_fuse(query, value, limits):
        saved = (mixed.contiguous(), logsumexp.contiguous())
        added = _added(limits.allowed, query.dtype)
        d_query, d_key, d_value = _fused_backward(
            d_mixed.contiguous(),
            query,
            key,
            value,
            *saved,
            0.0,
            limits.diagonal,
            attn_mask=added,
            scale=scale,
        )
        return d_query, d_key, d_value
    with without_autocast(query):
        scores = _scores(query, key, scale, limits)
        exact = scores.dtype
        d_mixed = d_mixed.to(exact)
        weights = (scores - logsumexp[..., None]).exp()
        pull = (d_mixed * mixed).sum(-1, keepdim=True)
        d_weights, kept = _times(d_mixed, value.to(exact).mT), weights
        if limits.factors is not None:
            d_weights, kept = d_weights * limits.factors, weights * limits.factors
        d_scores = (d_weights - pull) * weights * scale
        return (
            _times(d_scores, key.to(exact)),
            _gathered(d_scores, query.to(exact), key.shape[1]),
            _gathered(kept, d_mixed, key.shape[1]),
        )


def _can_fuse(query: Tensor, value: Tensor, limits: Limits) -> bool:
    """Whether torch's flash kernel for CPUs applies, which takes a log-sum-exp of whole rows back."""
    plain = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    return plain and limits.factors is None and query.numel() > 0


def _added(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, _NONE)


def _scores(query: Tensor, key: Tensor, scale: float, limits: Limits) -> Tensor:
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = _times(query.to(exact), key.to(exact).mT) * scale
    if limits.diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, _NONE)
    return scores if limits.allowed is None else scores.masked_fill(~limits.allowed, _NONE)


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
