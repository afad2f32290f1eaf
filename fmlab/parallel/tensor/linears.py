"""Products with matrices cut by columns and by rows, each with its communication; f's runs behind a product.

The input's gradient is ready before the weight's is begun, so its sum over ranks travels while the weight's
gradient is computed. That is why f and the products behind it are one autograd function here. Under sequence
parallelism the gathered input is not kept either: backward gathers it again, behind the input's gradient
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

Shapes: n rows (tokens), i inputs, o outputs; b, l, p as in functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.models.functions import compute_dtype, linear, without_autocast
from fmlab.parallel.mesh import Axis
from fmlab.parallel.tensor.functions import gathered, padded, summed_part

Weights = Sequence[tuple[Tensor, Tensor | None]]  # (weight, bias) of each matrix
_POSITIONS = 1  # the dim that sequence parallelism cuts


def column_linears(x: Tensor, weights: Weights, axis: Axis, length: int | None = None) -> tuple[Tensor, ...]:
    """f, then the products of x with one matrix or several that are cut by columns; f's sum is one message.

    x: [...,i], the same on all ranks; with `length` [b,p,i], this rank's positions of so many. weights: each
    [o/t,i] and [o/t]. Returns [...,o/t] for each, of all positions.
    """
    if torch.is_grad_enabled():
        flat = [tensor for pair in weights for tensor in pair]
        outputs: tuple[Tensor, ...] = _ColumnLinears.apply(x, axis, length, *flat)
        return outputs
    whole = x if length is None else gathered(x.to(compute_dtype(x)), axis, _POSITIONS, length)
    return tuple(linear(whole, weight, bias) for weight, bias in weights)


class _ColumnLinears(torch.autograd.Function):
    """Forward: [gather x,] the products. Backward: d_x, whose sum travels while d_weight is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, length: int | None, *flat: Any) -> Any:
        dtype = compute_dtype(x)
        weights, biases = [weight.to(dtype) for weight in flat[::2]], flat[1::2]
        with without_autocast(x):
            own = x.to(dtype)
            whole = own if length is None else gathered(own, axis, _POSITIONS, length)
            rows_ni = whole.flatten(0, -2)
            outputs = [
                rows_ni @ w.T if b is None else torch.addmm(b.to(dtype), rows_ni, w.T)
                for w, b in zip(weights, biases, strict=True)
            ]
        ctx.save_for_backward(own, *weights)
        ctx.axis, ctx.length, ctx.shape = axis, length, whole.shape
        ctx.dtypes = (x.dtype, *(None if t is None else t.dtype for t in flat))
        return tuple(y.view(*whole.shape[:-1], y.shape[1]) for y in outputs)

    # region backward
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_ys: Tensor) -> tuple[Tensor | None, ...]:
        own, *weights = ctx.saved_tensors
        axis, length = ctx.axis, ctx.length
        need_x, _, _, *need = ctx.needs_input_grad
        with without_autocast(own):
            d_ys_no = [d_y.flatten(0, -2) for d_y in d_ys]
            arriving = _start_gather(own, axis, length if any(need[::2]) else None)
            d_x = None
            if need_x:  # a part of the sum: this rank's columns
                d_x = d_ys_no[0] @ weights[0]
                for d_y_no, weight in zip(d_ys_no[1:], weights[1:], strict=True):
                    d_x.addmm_(d_y_no, weight)
            on_its_way = None if d_x is None else _start_sum(d_x.view(ctx.shape), axis, length)
            rows_ni = arriving().flatten(0, -2)
            gradients: list[Tensor | None] = []
            for d_y_no, need_w, need_b in zip(d_ys_no, need[::2], need[1::2], strict=True):
                gradients.append(d_y_no.T @ rows_ni if need_w else None)
                gradients.append(d_y_no.sum(0) if need_b else None)
            d_x = None if on_its_way is None else on_its_way()
        cast = [None if g is None else g.to(d) for g, d in zip((d_x, *gradients), ctx.dtypes, strict=True)]
        return cast[0], None, None, *cast[1:]

    # endregion


def row_linear(x: Tensor, weight: Tensor, axis: Axis, length: int | None = None) -> Tensor:
    """The product with a matrix cut by rows, then g: x [...,i/t], weight [o,i/t] -> [...,o] on all ranks.

    With `length` x is [b,l,i/t], and this rank gets its positions of the sum, [b,p,o].
    """
    return _RowLinear.apply(x, weight, axis, length)


class _RowLinear(torch.autograd.Function):
    """Forward: the product, summed over ranks. Backward: [gather the gradient,] two products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, length: int | None) -> Tensor:
        dtype = compute_dtype(x)
        with without_autocast(x):
            x_ni, w_oi = x.to(dtype).flatten(0, -2), weight.to(dtype)
            part = (x_ni @ w_oi.T).view(*x.shape[:-1], len(weight))
            ctx.save_for_backward(x_ni, w_oi)
        ctx.axis, ctx.length, ctx.shape, ctx.dtypes = axis, length, x.shape, (x.dtype, weight.dtype)
        return axis.all_reduce_(part) if length is None else summed_part(part, axis, _POSITIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x_ni, w_oi = ctx.saved_tensors
        need_x, need_w, _, _ = ctx.needs_input_grad
        if ctx.length is not None:
            d_y = gathered(d_y, ctx.axis, _POSITIONS, ctx.length)
        with without_autocast(d_y):
            d_y_no = d_y.flatten(0, -2)
            d_x = (d_y_no @ w_oi).to(ctx.dtypes[0]).view(ctx.shape) if need_x else None
            d_w = (d_y_no.T @ x_ni).to(ctx.dtypes[1]) if need_w else None
        return d_x, d_w, None, None


def _start_gather(own: Tensor, axis: Axis, length: int | None) -> Callable[[], Tensor]:
    """Begin to gather this rank's positions [b,p,i]; the result, called, waits and gives [b,l,i]."""
    if length is None:
        return lambda: own
    arriving = own.new_empty(axis.size, *own.shape)
    work = axis.all_gather_into(arriving, own.contiguous(), async_op=not axis.ours)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return torch.cat(arriving.unbind(), _POSITIONS).narrow(_POSITIONS, 0, length)

    return wait


def _start_sum(d_x: Tensor, axis: Axis, length: int | None) -> Callable[[], Tensor]:
    """Begin to sum d_x [...,i] over ranks; the result, called, waits and gives it, or this rank's
    positions."""
    if length is None:
        total, work = d_x, axis.all_reduce_(d_x, async_op=not axis.ours)
    else:
        parts = torch.stack(padded(d_x, axis.size, _POSITIONS).chunk(axis.size, _POSITIONS))
        total = torch.empty_like(parts[0])
        work = axis.reduce_scatter_into(total, parts, async_op=not axis.ours)

    def wait() -> Tensor:
        if work is not None and not axis.ours:
            work.wait()
        return total

    return wait
