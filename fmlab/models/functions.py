"""Autograd functions that give the numbers torch's own give, with less work on the way.

Weights are ordinary inputs of each, so hooks on parameters fire as they do elsewhere.

Shapes: n rows (tokens), i inputs, o outputs, v vocabulary, d hidden width.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a matmul on `x` runs in: autocast's where autocast is on, else that of `x`."""
    device = x.device.type
    if x.dtype != torch.float64 and _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def _has_autocast(device: str) -> bool:
    if torch.compiler.is_compiling():  # torch 2.9 cannot capture the question
        return device != "meta"
    return torch.amp.is_autocast_available(device)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off on the device of `x`; devices without autocast (meta) have none to switch off."""
    device = x.device.type
    if not _has_autocast(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for x [...,i], weight [o,i], bias [o], in autocast's dtype where autocast is on."""
    # A generation asks this for every matrix and token, so what is cheap to ask comes first.
    if x.device.type == "cpu":
        if x.dtype.itemsize == 2 or torch.is_autocast_enabled("cpu"):
            if compute_dtype(x).itemsize == 2 and not torch.compiler.is_compiling():
                return _Linear16.apply(x, weight, bias)
        elif (
            not torch.is_grad_enabled() and x.numel() // x.shape[-1] in _FEW_ROWS and _may_take_few(x, weight)
        ):
            x_ni = x.reshape(-1, x.shape[-1])
            return _few_rows(x_ni, weight, bias).view(*x.shape[:-1], len(weight))
    return F.linear(x, weight, bias)


# Where the product below is faster on the CPU: batches of a generation, weights beyond the nearest caches.
_FEW_ROWS = range(5, 41)
_LARGE = 2**20
_PLAIN = (Tensor, nn.Parameter)  # no subclass that brings products of its own
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _may_take_few(x: Tensor, weight: Tensor) -> bool:
    plain = type(weight) in _PLAIN and x.dtype == torch.float32
    return plain and weight.numel() >= _LARGE and not torch.compiler.is_compiling()


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n,i] @ weight.T + bias, without MKL's slow way with few rows.

    oneDNN has a kernel for them. Without it, the transpose of weight @ x.T is next best. GPT-2's output
    matrix and 8 rows on one busy core: 20 ms and 29 ms, where F.linear takes 41 ms.
    """
    if _ONEDNN:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    y_on = weight @ x.T if bias is None else torch.addmm(bias[:, None], weight, x.T)
    return y_on.T.contiguous()


if _ONEDNN:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _count_few_rows(x_shape: list[int], weight_shape: list[int], *_: Any, **__: Any) -> int:
        """For torch's FLOP counter, which does not know this operation."""
        return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


class _Linear16(torch.autograd.Function):
    """Forward: the product in 16 bits. Backward: two products and a sum, each cast to its input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = compute_dtype(x)
        with without_autocast(x):
            x_ni, w_oi = x.to(dtype).flatten(0, -2), weight.to(dtype)
            # addmm adds the bias while it writes the product: no further pass
            y_no = _product(x_ni, w_oi.T) if bias is None else torch.addmm(bias.to(dtype), x_ni, w_oi.T)
        ctx.save_for_backward(x_ni, w_oi)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y_no.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x_ni, w_oi = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        need_x, need_w, need_bias = ctx.needs_input_grad
        d_x = d_w = d_bias = None
        with without_autocast(d_y):
            d_y_no = d_y.flatten(0, -2)
            if need_x:
                d_x = _product(d_y_no, w_oi).to(x_dtype).view(ctx.shape)
            if need_w:
                d_w = (d_y_no.T @ x_ni).to(w_dtype)
            if need_bias:
                # a 16-bit sum runs in fp32 inside; asked for an fp32 result it would first copy everything
                d_bias = d_y_no.sum(0).to(bias_dtype)
        return d_x, d_w, d_bias


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for 16-bit matrices on the CPU.

    oneDNN leaves threads idle when the result is narrow: [1024,3072] x [3072,768] takes as long on two
    threads as on one. Two products of half the rows do not.
    """
    rows, columns = a.shape[0], b.shape[1]
    if 2 * columns > b.shape[0] or rows < 2 or torch.get_num_threads() == 1:
        return a @ b
    out = a.new_empty(rows, columns)
    for half in (slice(0, rows // 2), slice(rows // 2, rows)):
        torch.mm(a[half], b, out=out[half])
    return out


def look_up_and_lend(weight: Tensor, ids: Tensor, padding: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows `ids` of an embedding [v,d], and the embedding itself for its second use as the output matrix.

    `padding` is a row that gets no gradient from being looked up, as nn.Embedding's padding_idx.

    The two uses get one gradient: that of the look-up is added, a few rows, to that of the output matrix.
    Apart, they would be two tensors of [v,d], one of them almost all zeros, and a sum over both.
    """
    return _LookUpAndLend.apply(weight, ids, padding)


class _LookUpAndLend(torch.autograd.Function):
    """Forward: the look-up and a view of the weight. Backward: both gradients in one tensor."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding = weight.shape, padding
        ctx.set_materialize_grads(False)
        return F.embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_rows: Tensor | None, d_weight: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        if d_rows is None:
            return d_weight, None, None
        if d_weight is None:
            d_weight = torch.zeros(ctx.shape, dtype=d_rows.dtype, device=d_rows.device)
        without_look_ups = None if ctx.padding is None else d_weight[ctx.padding].clone()
        d_weight.index_add_(0, ids.flatten(), d_rows.flatten(0, -2))
        if without_look_ups is not None:
            d_weight[ctx.padding] = without_look_ups
        return d_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim of x [...,d]; for one dtype of 32 bits or more.

    On CPUs torch puts F.rms_norm together from six operations, each with its own tensor and gradient.
    """
    if not torch.is_grad_enabled():
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Forward: a norm a row, two products. Backward: with y = x / rms, d_x = (g - y * mean(g * y)) / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        product = d_out * normed
        d_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        d_x = None
        if ctx.needs_input_grad[0]:
            mean = (product @ weight).div_(-x.shape[-1]).unsqueeze(-1)
            d_x = torch.mul(d_out, weight, out=product).addcmul_(normed, mean).mul_(inverse)
        return d_x, d_weight, None
