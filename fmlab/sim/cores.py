"""Attention cores for shapes: fused in one kernel, or with its table of scores; and the latter made again.

A tensor on the meta device would send torch's attention to its slow definition, mask table and all. These
say plainly which kernels an accelerator runs. Causality is part of the kernel, and costs full attention: the
half that is masked is charged too.

Shapes: b batch, h query heads, g key/value heads, q queries, s keys, k head width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_flop_count

from fmlab.models.attention import AttentionCore, AttentionMask

ATTENTION = ("fused", "unfused")


Again = Callable[[], AbstractContextManager[None]]  # entered around what is made a second time


def attention_core(kind: str, again: Again | None = None) -> AttentionCore:
    """The core called `kind`; with `again` its inside is not kept but made again in the backward pass.

    "fused":   scores never leave the chip (flash attention). A learned bias (T5's) sends it to "unfused",
               as no such kernel gives its gradient.
    "unfused": scores, softmax, dropout and mixture as operators of their own, 16-bit tables [b,h,q,s].

    Raises ValueError for another name.
    """
    if kind not in ATTENTION:
        raise ValueError(f"attention={kind!r} is unknown; legal: {', '.join(ATTENTION)}")
    if kind == "fused":
        return _fused
    return _unfused if again is None else _again_core(again)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """One kernel forward, one backward; a key/value head is read once for its group. See AttentionCore."""
    if bias is not None:
        return _unfused(query, key, value, mask, dropout, scale=scale, bias=bias)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and not _counts_groups():
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    mixed: Tensor = flash(query, key, value, dropout, mask.causal, scale=scale)[0]
    return mixed


@cache
def _counts_groups() -> bool:
    """Whether torch counts the FLOPs of a kernel whose query heads share key/value heads (2.9 does not)."""
    try:
        sdpa_flop_count((1, 2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1))
    except AssertionError:
        return False
    return True


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Operators of their own; scale and mask belong to the kernels beside them; see AttentionCore."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores_bhqs = query @ key.transpose(-1, -2)
    if bias is not None:
        scores_bhqs = scores_bhqs + bias.to(scores_bhqs.dtype)
    return _dropout(scores_bhqs.softmax(-1), dropout) @ value


def _again_core(again: Again) -> AttentionCore:
    """`_unfused`, whose inside is made again in the backward pass."""

    def core(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        dropout: float = 0.0,
        *,
        scale: float | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        def inside(q: Tensor, k: Tensor, v: Tensor, b: Tensor | None = None) -> Tensor:
            return _unfused(q, k, v, mask, dropout, scale=scale, bias=b)

        inputs = (query, key, value) if bias is None else (query, key, value, bias)
        result: Tensor = _Again.apply(inside, again, *inputs)
        return result

    return core


class FusedDropout(TorchFunctionMode):
    """Dropout in one kernel with a mask of a byte, as on accelerators; torch takes it apart on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return _dropout(*args, **(kwargs or {}))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if p and training else x


class _Again(torch.autograd.Function):
    """Forward: `core(*inputs)`, keeping the inputs only. Backward: the same once more, then its gradients."""

    @staticmethod
    def forward(ctx: Any, core: Callable[..., Tensor], again: Again, *inputs: Tensor) -> Tensor:
        ctx.core, ctx.again = core, again
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return core(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad(), ctx.again():
            result = ctx.core(*inputs)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, gradient))
        return None, None, *(next(found) if x.requires_grad else None for x in inputs)
