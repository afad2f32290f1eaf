"""A bias and GELU in one pass (Hendrycks and Gimpel 2016, 1606.08415): the sum never leaves the chip.

Forward, a program holds one row. Backward, the sum is made again from the input, and the gradient of the
bias, a sum over all rows, is summed on the chip first, as in `fmlab.kernels.triton.layer_normalisation`.

Shapes: x [..., columns], bias [columns].
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
def bias_gelu_kernel(x_ptr, bias_ptr, y_ptr, COLUMNS, TANH: tl.constexpr, BLOCK: tl.constexpr):
    # region bias gelu
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    x = tl.load(x_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if TANH:  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), with z = sqrt(2 / pi) * (x + 0.044715 x^3)
        share = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        share = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
    tl.store(y_ptr + row * COLUMNS + at, x * share, mask=inside)
    # endregion


@kernel
def bias_gelu_backward_kernel(
    x_ptr, bias_ptr, dy_ptr, dx_ptr, dbias_ptr, ROWS, COLUMNS, TANH: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    d_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, ROWS, tl.num_programs(0)):
        x = bias + tl.load(x_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
        if TANH:
            share = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
            slope = share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
        else:
            share = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
            slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)  # the normal density
        d_x = dy * (share + x * slope)
        tl.store(dx_ptr + row * COLUMNS + at, d_x, mask=inside)
        d_bias += d_x
    tl.store(dbias_ptr + program * COLUMNS + at, d_bias, mask=inside)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """GELU of `x` + `bias`, computed in fp32, with gradients.

    approximate: "none" (by erf, as BERT's) or "tanh" (as GPT-2's), the names that torch uses.
    Raises ValueError for another, shapes that do not fit, and rows of more than 65,536 numbers.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r}; choose 'none' (by erf) or 'tanh'")
    checks.same_kind(x=x, bias=bias)
    _, columns = checks.rows_and_columns("x", x)
    checks.shape("bias", bias, [columns], "[columns]")
    y: Tensor = _BiasGELU.apply(x, bias, approximate == "tanh")
    return y


class _BiasGELU(torch.autograd.Function):
    """Forward: GELU of the sum, which is not kept. Backward: the sum again, and GELU's slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        x, bias = x.contiguous(), bias.contiguous()
        rows, columns = checks.rows_and_columns("x", x)
        y = torch.empty_like(x)
        if rows:
            block = triton.next_power_of_2(columns)
            bias_gelu_kernel[(rows,)](x, bias, y, columns, tanh, block, num_warps=warps_for(block))
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        rows, columns = checks.rows_and_columns("x", x)
        d_x, programs = torch.empty_like(x), min(rows, PROGRAMS)
        d_bias = x.new_zeros(programs, columns, dtype=torch.float32)
        if rows:
            block = triton.next_power_of_2(columns)
            bias_gelu_backward_kernel[(programs,)](
                x, bias, d_y.contiguous(), d_x, d_bias, rows, columns, ctx.tanh,
                block, num_warps=warps_for(block),
            )  # fmt: skip
        return d_x, d_bias.sum(0).to(bias.dtype), None
