"""Operators for which torch takes another road on other devices: here they go the CPU's, number for number.

Without this, losses on a simulated chip would differ from those of the CPU in their last bits, and attention
would write its whole matrix of scores to memory, which no accelerator does any more.
"""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_FLASH = 1  # of torch.nn.attention.SDPBackend; on a CPU the only fused one


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """(x with dropout, what was kept), by the CPU's formula: a mask that is scaled first."""
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    noise = torch.empty_like(x).bernoulli_(1 - p)
    kept = noise != 0
    return x * noise.div_(1 - p), kept


def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The gradient, by the same formula."""
    keep = 1 / scale if scale else 1.0
    return grad * mask.to(grad.dtype).div_(keep)


#: operator -> what to run on the raw tensors in its place
AS_ON_CPU: dict[Any, Any] = {
    aten.native_dropout.default: native_dropout,
    aten.native_dropout_backward.default: native_dropout_backward,
}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention on simulated tensors: the fused operator where the CPU has one for it."""
    raw: list[Any] = [getattr(t, "raw", t) for t in (query, key, value, attn_mask)]
    mask = attn_mask
    if raw[0].device.type == "meta":
        fused = dropout_p == 0 and query.dim() == 4 and query.shape[-3] == key.shape[-3]
        fused = fused and query.shape[-1] == value.shape[-1]
    else:
        choice = torch._fused_sdp_choice(
            raw[0],
            raw[1],
            raw[2],
            raw[3],
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        fused = choice == _FLASH
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        fused = False  # a learned bias, as T5's: the fused operator has no gradient for it
    if fused:
        if mask is not None and mask.dtype == torch.bool:
            zeros = torch.zeros_like(mask, dtype=query.dtype)
            mask = zeros.masked_fill_(mask.logical_not(), float("-inf"))
        out, _ = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )
        return out
    out, _ = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return out


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(hy, cy, nothing) of the operator that torch has for GPUs alone, in steps that autograd sees."""
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    take, keep, new, show = gates.chunk(4, 1)
    cy = keep.sigmoid() * cx + take.sigmoid() * new.tanh()
    return show.sigmoid() * cy.tanh(), cy, gates.new_empty(0)


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(hy, nothing), likewise."""
    from_input = input_gates if input_bias is None else input_gates + input_bias
    from_hidden = hidden_gates if hidden_bias is None else hidden_gates + hidden_bias
    reset_x, update_x, new_x = from_input.chunk(3, 1)
    reset_h, update_h, new_h = from_hidden.chunk(3, 1)
    update = (update_x + update_h).sigmoid()
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return (hx - new) * update + new, hx.new_empty(0)


#: functions in place of operators, on simulated tensors, above autograd: it differentiates their steps
COMPOSITES: dict[str, Any] = {
    "scaled_dot_product_attention": attention,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_gru_cell": gru_cell,
}
