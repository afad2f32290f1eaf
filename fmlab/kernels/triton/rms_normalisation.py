"""Root-mean-square normalisation: without the mean (Zhang and Sennrich 2019, arXiv:1910.07467).

Forward, a program holds one row. Backward, a program walks over every so-many-th row and sums the gradient
of the weight on the chip, as in `fmlab.kernels.triton.layer_normalisation`.

Shapes: x [..., columns], weight [columns].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.kernels.triton import checks
from fmlab.kernels.triton.launch import kernel, warps_for
from fmlab.kernels.triton.layer_normalisation import PROGRAMS


@kernel
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, rrms_ptr, COLUMNS, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    x = tl.load(x_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
    rrms = 1 / tl.sqrt(tl.sum(x * x, axis=0) / COLUMNS + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * COLUMNS + at, x * rrms * weight, mask=inside)
    tl.store(rrms_ptr + row, rrms)


@kernel
def rms_norm_backward_kernel(
    x_ptr, weight_ptr, dy_ptr, rrms_ptr, dx_ptr, dweight_ptr, ROWS, COLUMNS, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, ROWS, tl.num_programs(0)):
        x = tl.load(x_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
        rrms = tl.load(rrms_ptr + row)
        normal, pull = x * rrms, dy * weight
        stretch = tl.sum(pull * normal, axis=0) / COLUMNS  # what only stretches the row changes nothing
        tl.store(dx_ptr + row * COLUMNS + at, rrms * (pull - normal * stretch), mask=inside)
        d_weight += dy * normal
    tl.store(dweight_ptr + program * COLUMNS + at, d_weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The last dimension of `x` over its root mean square, times `weight`; in fp32, with gradients.

    The product with the weight is rounded once, at the end. Raises ValueError for shapes that do not fit,
    rows of more than 65,536 numbers, and eps below 0.
    """
    checks.same_kind(x=x, weight=weight)
    _, columns = checks.rows_and_columns("x", x)
    checks.shape("weight", weight, [columns], "[columns]")
    if eps < 0:
        raise ValueError(f"eps={eps} is added to a mean of squares: give 0 or more")
    normal: Tensor = _RowScale.apply(x, weight, eps)
    return normal


class _RowScale(torch.autograd.Function):
    """Forward: divide each row by its root mean square, and keep 1 over it. Backward: make the rest again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        rows, columns = checks.rows_and_columns("x", x)
        y, rrms = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        if rows:
            block = triton.next_power_of_2(columns)
            rms_norm_kernel[(rows,)](x, weight, y, rrms, columns, eps, block, num_warps=warps_for(block))
        ctx.save_for_backward(x, weight, rrms)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rrms = ctx.saved_tensors
        rows, columns = checks.rows_and_columns("x", x)
        d_x, programs = torch.empty_like(x), min(rows, PROGRAMS)
        d_weight = x.new_zeros(programs, columns, dtype=torch.float32)
        if rows:
            block = triton.next_power_of_2(columns)
            rms_norm_backward_kernel[(programs,)](
                x, weight, d_y.contiguous(), rrms, d_x, d_weight, rows, columns,
                block, num_warps=warps_for(block),
            )  # fmt: skip
        return d_x, d_weight.sum(0).to(weight.dtype), None
