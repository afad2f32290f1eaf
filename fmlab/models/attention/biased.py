"""Attention whose bias is learned, on the CPU: scores, softmax and gradients a row of the batch at a time.

torch's tiled kernels give no gradient for a term that is added to the scores, so a learned bias sends
scaled_dot_product_attention to its slow definition. The gradient of the bias needs all scores anyway; here
they are made for a row of the batch at a time, in place, and only the probabilities are kept.

Shapes: b batch, h heads, q queries, s keys, k head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    blind: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * query key^T + bias + mask) value, [b,h,q,k]; gradients for the first four.

    Args:
        query: [b,h,q,k]. key, value: [b,h,s,k]. bias: [1,h,q,s].
        mask: [b or 1, 1, q, s], 0 or -inf.
        blind: bool [b or 1, 1, q, 1], the queries that may look at nothing, if any: they give zeros.
        scale: None for 1 / sqrt(k).

    Scores and softmax are float32 or wider; 16-bit inputs are multiplied in 16 bits elsewhere.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _BiasedAttention.apply(query, key, value, bias, mask, blind, scale)


class _BiasedAttention(torch.autograd.Function):
    """Forward: two products and a softmax. Backward: four products and the softmax's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        mask: Tensor | None,
        blind: Tensor | None,
        scale: float,
    ) -> Tensor:
        b, h, q, s = *query.shape[:3], key.shape[2]
        exact = torch.promote_types(query.dtype, torch.float32)
        bias_hqs = bias[0].to(exact)
        probs = query.new_empty(b, h, q, s)
        mixed = _heads_side_by_side(query, value.shape[-1])
        masks, blinds = (None if x is None else x.expand(b, -1, -1, -1) for x in (mask, blind))
        for row, kept in enumerate(probs):  # [h,q,s]
            scores = kept if kept.dtype == exact else torch.empty(kept.shape, dtype=exact)
            torch.baddbmm(bias_hqs, query[row].to(exact), key[row].to(exact).mT, alpha=scale, out=scores)
            if masks is not None:
                scores += masks[row]
            torch.softmax(scores, -1, out=scores)
            if blinds is not None:
                scores.masked_fill_(blinds[row], 0.0)
            if scores is not kept:
                kept.copy_(scores)
            torch.bmm(kept, value[row], out=mixed[row])
        ctx.save_for_backward(query, key, value, probs)
        ctx.scale, ctx.bias_dtype = scale, bias.dtype
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, probs = ctx.saved_tensors
        exact = torch.promote_types(query.dtype, torch.float32)
        d_query, d_key, d_value = (_heads_side_by_side(x, x.shape[-1]) for x in (query, key, value))
        d_bias = torch.zeros(probs.shape[1:], dtype=ctx.bias_dtype, device=probs.device)
        for row, p_hqs in enumerate(probs):
            torch.bmm(p_hqs.mT, d_mixed[row], out=d_value[row])
            d_scores = torch.bmm(d_mixed[row], value[row].mT).to(exact)
            p_hqs = p_hqs.to(exact)
            torch.ops.aten._softmax_backward_data.out(d_scores, p_hqs, -1, exact, grad_input=d_scores)
            d_bias += d_scores
            d_scores = d_scores.to(query.dtype)
            torch.bmm(d_scores, key[row], out=d_query[row])
            torch.bmm(d_scores.mT, query[row], out=d_key[row])
        if ctx.scale != 1:
            d_query *= ctx.scale
            d_key *= ctx.scale
        return d_query, d_key, d_value, d_bias[None], None, None, None


def _heads_side_by_side(like: Tensor, width: int) -> Tensor:
    """An empty [b,h,l,width] laid out [b,l,h,width] like the matrices around it, so that none is copied."""
    b, h, length = like.shape[:3]
    return like.new_empty(b, length, h, width).transpose(1, 2)
