"""Attention by torch's FlexAttention: a mask given as a function of indices, compiled into one kernel.

Dong et al. 2024, arXiv:2412.05496. The kernel skips blocks of the table in which the mask hides everything.

Shapes: b batch, h heads, q queries, s keys.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fmlab.models.attention.mask import AttentionMask

KINDS = 64  # kernels kept: one for each combination of mask parts, bias and head counts; torch keeps 8
Index = Tensor
MaskFunction = Callable[[Index, Index, Index, Index], Tensor]  # (batch, head, query, key) -> may look


def flex_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention by FlexAttention, compiled at the first call of each kind; see AttentionCore.

    Raises ValueError for dropout, which it does not have, and for gradients on a CPU, where torch implements
    the forward pass only; RuntimeError where torch cannot compile it.
    """
    tensors = [query, key, value] + ([] if bias is None else [bias])
    if dropout:
        raise ValueError("FlexAttention has no dropout; set it to 0, or take sdpa_core or flash_core")
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if query.device.type == "cpu" and differentiable:
        raise ValueError(
            "FlexAttention has no backward pass on a CPU; run it under torch.no_grad(), "
            "or take sdpa_core or flash_core"
        )
    add_bias = None if bias is None else _bias_function(bias)
    grouped = key.shape[1] != query.shape[1]
    blocks = None if mask.plain and not mask.causal else _block_mask(mask, query.device)
    attend = _compiled()
    with torch._dynamo.config.patch(recompile_limit=KINDS):
        mixed: Tensor = attend(
            query, key, value, score_mod=add_bias, block_mask=blocks, scale=scale, enable_gqa=grouped
        )
    return mixed


@cache
def _compiled() -> Callable[..., Any]:
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError as error:
        raise RuntimeError("this torch has no FlexAttention; take sdpa_core or flash_core") from error
    if any(character.isspace() for character in torch.__file__):
        raise RuntimeError(
            f"torch cannot compile from a folder with a space in its path ({torch.__file__}); "
            "move the environment, or take sdpa_core or flash_core"
        )
    if not torch._dynamo.is_dynamo_supported():
        raise RuntimeError(
            f"torch cannot compile FlexAttention on {sys.platform}; take sdpa_core or flash_core"
        )
    return torch.compile(flex_attention, fullgraph=True)


def _bias_function(bias: Tensor) -> Callable[[Tensor, Index, Index, Index, Index], Tensor]:
    rows = bias.shape[0]

    def add(score: Tensor, b: Index, h: Index, q: Index, s: Index) -> Tensor:
        return score + bias[b if rows > 1 else 0, h, q, s]

    return add


def _block_mask(mask: AttentionMask, device: torch.device) -> Any:
    """FlexAttention's own form of a mask, made once."""
    from torch.nn.attention.flex_attention import create_block_mask

    if "flex" not in mask._made:
        per_row = [part for part in (mask.real_keys, mask.prefix, mask.query_documents) if part is not None]
        rows = len(per_row[0]) if per_row else None
        made = create_block_mask(mask_function(mask, device), rows, None, mask.queries, mask.keys, device)
        mask._made["flex"] = made
    return mask._made["flex"]


def mask_function(mask: AttentionMask, device: torch.device) -> MaskFunction:
    """The mask as a function of (batch, head, query, key) indices."""
    past, window, prefix, real = mask.past, mask.window, mask.prefix, mask.real_keys
    mine, theirs, causal = mask.query_documents, mask.key_documents, mask.causal
    layout = None if mask.blocks is None else mask.blocks.layout.to(device)
    size = 1 if mask.blocks is None else mask.blocks.size

    def may_look(b: Index, h: Index, q: Index, s: Index) -> Tensor:
        distance = q + past - s
        allowed = distance >= 0 if causal else distance == distance
        if window is not None:
            allowed = allowed & (distance < window) & (distance > -window)
        if layout is not None:
            allowed = allowed & layout[(q + past) // size, s // size]
        if prefix is not None:
            allowed = allowed | (s < prefix[b])
        if real is not None:
            allowed = allowed & real[b, s]
        if mine is not None and theirs is not None:
            allowed = allowed & (mine[b, q] == theirs[b, s])
        return allowed

    return may_look
