"""The core of attention: mixing values by the likeness of queries and keys.

Shapes: b batch, h query heads, g key/value heads (a divisor of h), q queries, s keys, k head width.

The core is an injected callable, so that ring attention, a hand-written flash kernel or a counting wrapper
slips into any model.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.models.attention.biased import biased_attention
from fmlab.models.attention.definition import quadratic_core
from fmlab.models.attention.mask import AttentionMask
from fmlab.models.attention.wide import wide_attention
from fmlab.models.dropout import draws_masks
from fmlab.models.functions import without_autocast


class AttentionCore(Protocol):
    """softmax(scale * query key^T + bias + mask) value, in any way that gives these numbers."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        dropout: float = 0.0,
        *,
        scale: float | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The mixed values [b,h,q,k].

        Args:
            query: [b,h,q,k]. key, value: [b,g,s,k]; with g < h, query head i uses head i // (h / g).
            mask: who may look at whom; a query that may look at nothing gives zeros.
            dropout: of the probabilities; 0 in eval mode.
            scale: of the products; None for 1 / sqrt(k). T5 has 1.
            bias: [b or 1, h, q, s], added to the scaled products; differentiable (T5, ALiBi).
        """


def sdpa_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    finite: bool | None = None,
) -> Tensor:
    """Attention by torch's fused kernels; see AttentionCore. With dropout under an engine's masks it is
    `quadratic_core`.

    Args:
        finite: use a mask without -inf; None for where it is needed, on everything but CPUs and NVIDIA GPUs.
    """
    if dropout and draws_masks():  # the fused kernels draw their own
        return quadratic_core(query, key, value, mask, dropout, scale=scale, bias=bias)
    grouped = key.shape[1] != query.shape[1]
    if mask.plain and bias is None:
        causal = mask.causal and mask.queries == mask.keys
        settings: dict[str, Any] = dict(dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped)
        if not _better_in_fp32(query, key):
            return F.scaled_dot_product_attention(query, key, value, **settings)
        if not (dropout or grouped) and query.shape[3] == value.shape[3] and key.shape[2]:
            return wide_attention(query, key, value, causal, scale)
        with without_autocast(query):
            wide = (query.float(), key.float(), value.float())
            return F.scaled_dot_product_attention(*wide, **settings).to(query.dtype)
    if finite is None:
        finite = query.device.type not in ("cpu", "cuda", "meta")
    added = None if mask.plain and not mask.causal else mask.dense(query.dtype, query.device, finite)
    if bias is not None:
        learned = torch.is_grad_enabled() and bias.requires_grad and len(bias) == 1
        if (
            learned
            and query.device.type == "cpu"
            and not (dropout or grouped or torch.compiler.is_compiling())
        ):
            blind = mask.blind(query.device) if added is not None else None
            blind = blind if blind is not None and blind.any() else None
            return biased_attention(query, key, value, bias, added, blind, scale)
        bias = bias.to(query.dtype)
        added = bias if added is None else bias + added
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=added, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    # A row of -inf gives zeros in torch's kernels, a row of equal finite numbers the mean of the values.
    return mixed.masked_fill(mask.blind(query.device), 0) if finite else mixed


def _better_in_fp32(query: Tensor, key: Tensor) -> bool:
    """Whether 16-bit attention that will be differentiated on the CPU is faster, and more exact, in fp32.

    The backward pass of torch's 16-bit CPU kernel takes up to 3 times as long as that of its fp32 kernel
    where keys are few or heads narrow; with 256 keys and heads of 64 it is the faster one.
    """
    small = key.shape[2] <= 128 or query.shape[3] <= 32
    here = query.device.type == "cpu" and query.dtype.itemsize == 2
    learning = torch.is_grad_enabled() and query.requires_grad and not torch.compiler.is_compiling()
    return small and here and learning
