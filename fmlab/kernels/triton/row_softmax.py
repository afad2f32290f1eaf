"""Softmax of rows in one pass: a row is loaded once, and its result stored once.

Written with separate operations (largest, difference, exp, sum, quotient) each step would read and write the
whole row again. Here the row stays on the chip between the steps.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.kernels.triton import checks
from fmlab.kernels.triton.launch import kernel, warps_for


@kernel
def softmax_kernel(x_ptr, y_ptr, COLUMNS, BLOCK: tl.constexpr):
    # region softmax
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * COLUMNS + at, mask=at < COLUMNS, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * COLUMNS + at, weights / tl.sum(weights, axis=0), mask=at < COLUMNS)
    # endregion


@kernel
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, COLUMNS, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * COLUMNS + at, mask=at < COLUMNS, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * COLUMNS + at, mask=at < COLUMNS, other=0.0).to(tl.float32)
    pull = tl.sum(y * dy, axis=0)  # what raising all of a row's inputs alike would change: taken off
    tl.store(dx_ptr + row * COLUMNS + at, y * (dy - pull), mask=at < COLUMNS)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, computed in fp32, with gradients.

    Raises ValueError for rows longer than a program can hold (65,536) and for unknown dtypes. A row of -inf
    alone gives nan, as in torch.
    """
    checks.same_kind(x=x)
    checks.rows_and_columns("x", x)
    weights: Tensor = _RowSoftmax.apply(x)
    return weights


class _RowSoftmax(torch.autograd.Function):
    """Forward: a row's exponentials over their sum. Backward: from the output alone, no input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        rows, columns = checks.rows_and_columns("x", x)
        if rows:
            block = triton.next_power_of_2(columns)
            softmax_kernel[(rows,)](x, y, columns, block, num_warps=warps_for(block))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        d_y = d_y.contiguous()
        d_x = torch.empty_like(y)
        rows, columns = checks.rows_and_columns("y", y)
        if rows:
            block = triton.next_power_of_2(columns)
            softmax_backward_kernel[(rows,)](y, d_y, d_x, columns, block, num_warps=warps_for(block))
        return d_x
