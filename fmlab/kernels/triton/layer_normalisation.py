"""Layer normalisation: each row is moved to mean 0 and scaled to variance 1 (Ba et al. 2016, 1607.06450).

Forward, a program holds one row. Backward, a program walks over every so-many-th row, so that the gradients
of weight and bias, which are sums over all rows, are summed on the chip first: one partial sum a program is
stored, and PROGRAMS of them are added at the end. Always in the same order, so results repeat.

Shapes: x [..., columns], weight and bias [columns].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.kernels.triton import checks
from fmlab.kernels.triton.launch import kernel, warps_for

PROGRAMS = 64  # partial sums of the weights' gradients; fewer where there are fewer rows


@kernel
def layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, COLUMNS, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    x = tl.load(x_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / COLUMNS
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / COLUMNS + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * COLUMNS + at, centred * rstd * weight + bias, mask=inside)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@kernel
def layer_norm_backward_kernel(
    x_ptr, weight_ptr, dy_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, ROWS, COLUMNS,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    d_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, ROWS, tl.num_programs(0)):
        x = tl.load(x_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        normal = tl.where(inside, (x - mean) * rstd, 0.0)
        pull = dy * weight
        # what only shifts or only stretches the row changes nothing: both parts are taken off
        shift = tl.sum(pull, axis=0) / COLUMNS
        stretch = tl.sum(pull * normal, axis=0) / COLUMNS
        tl.store(dx_ptr + row * COLUMNS + at, rstd * (pull - shift - normal * stretch), mask=inside)
        d_weight += dy * normal
        d_bias += dy
    tl.store(dweight_ptr + program * COLUMNS + at, d_weight, mask=inside)
    tl.store(dbias_ptr + program * COLUMNS + at, d_bias, mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalise the last dimension of `x`, then scale by `weight` and add `bias`; in fp32, with gradients.

    Raises ValueError for shapes that do not fit, rows of more than 65,536 numbers, and eps below 0.
    """
    checks.same_kind(x=x, weight=weight, bias=bias)
    _, columns = checks.rows_and_columns("x", x)
    checks.shape("weight", weight, [columns], "[columns]")
    checks.shape("bias", bias, [columns], "[columns]")
    if eps < 0:
        raise ValueError(f"eps={eps} is added to a variance: give 0 or more")
    normal: Tensor = _RowNorm.apply(x, weight, bias, eps)
    return normal


class _RowNorm(torch.autograd.Function):
    """Forward: centre and scale each row, keep its mean and 1/deviation. Backward: make the rest again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        rows, columns = checks.rows_and_columns("x", x)
        y = torch.empty_like(x)
        mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
        if rows:
            block = triton.next_power_of_2(columns)
            layer_norm_kernel[(rows,)](
                x, weight, bias, y, mean, rstd, columns, eps, block, num_warps=warps_for(block)
            )
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        rows, columns = checks.rows_and_columns("x", x)
        d_x, programs = torch.empty_like(x), min(rows, PROGRAMS)
        d_weight, d_bias = (x.new_zeros(programs, columns, dtype=torch.float32) for _ in range(2))
        if rows:
            block = triton.next_power_of_2(columns)
            layer_norm_backward_kernel[(programs,)](
                x, weight, d_y.contiguous(), mean, rstd, d_x, d_weight, d_bias, rows, columns,
                block, num_warps=warps_for(block),
            )  # fmt: skip
        return d_x, d_weight.sum(0).to(weight.dtype), d_bias.sum(0).to(weight.dtype), None
