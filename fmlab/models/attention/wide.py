"""16-bit attention worked out in fp32 on the CPU, without keeping fp32 copies for the backward pass.

Shapes: b batch, h heads, q queries, s keys, k head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.models.functions import without_autocast


def wide_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(scale * query key^T) value for 16-bit [b,h,q,k] and [b,h,s,k], computed in fp32: [b,h,q,k].

    Without dropout, s > 0. `causal` and `scale` as in F.scaled_dot_product_attention.
    """
    return _WideAttention.apply(query, key, value, causal, scale)


class _WideAttention(torch.autograd.Function):
    """Forward and backward: torch's tiled kernel on fp32 copies. Between them: what came in and went out.

    The caller's own casts would be kept in fp32, twice the bytes, and beside them the 16-bit result.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> Tensor:
        with without_autocast(query):
            mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query.float(), key.float(), value.float(), 0.0, causal, scale=scale
            )
        mixed = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, log_sum)
        ctx.causal, ctx.scale = causal, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, log_sum = ctx.saved_tensors
        with without_autocast(query):
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_mixed.float(),
                query.float(),
                key.float(),
                value.float(),
                mixed.float(),
                log_sum,
                0.0,
                ctx.causal,
                scale=ctx.scale,
            )
        return *(gradient.to(query.dtype) for gradient in gradients), None, None
