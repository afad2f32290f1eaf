"""Megatron's f and g, and their sequence-parallel forms: what forward does, backward does the other way
round.

    f   copy in forward, sum in backward    before matrices cut by columns: each rank uses all of x, so each
                                            has a part of its gradient
    g   sum in forward, copy in backward    behind a matrix cut by rows: each rank has a part of the sum

Shoeybi et al. 2019 (arXiv:1909.08053), section 3. Where the stream between matrices is cut along its
positions (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), f gathers in forward and
reduce-scatters in backward, and g the reverse: the same bytes, for an all-reduce is a reduce-scatter and an
all-gather.

Shapes: b batch, l positions, p = ceil(l / t) positions of one of t ranks, d hidden width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.parallel.mesh import Axis


# region f
class _CopyForwardSumBackward(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce_(d_x.clone(memory_format=torch.contiguous_format)), None


# endregion


# region g
class _SumForwardCopyBackward(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        return d_x, None


# endregion


class _GatherForwardSplitBackward(torch.autograd.Function):
    """The parts of all ranks side by side; backward: of a gradient that all ranks have, the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gathered(x, axis, dim, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None, None]:
        return own_part(d_x, ctx.axis, ctx.dim), None, None, None


class _GatherForwardScatterBackward(torch.autograd.Function):
    """f over positions: all ranks' parts; backward: of the sum of all ranks' gradients, the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gathered(x, axis, dim, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None, None]:
        return summed_part(d_x, ctx.axis, ctx.dim), None, None, None


class _SplitForwardGatherBackward(torch.autograd.Function):
    """Of what all ranks have, the own part; backward: the gradients of all parts side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, x.shape[dim]
        return own_part(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None]:
        return gathered(d_x, ctx.axis, ctx.dim, ctx.length), None, None


def copy_forward_sum_backward(x: Tensor, axis: Axis) -> Tensor:
    """x; its gradient is the sum of those of all ranks (f)."""
    return _CopyForwardSumBackward.apply(x, axis)


def sum_forward_copy_backward(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all ranks' x; the gradient of each is that of the sum (g)."""
    return _SumForwardCopyBackward.apply(x, axis)


def gather_forward_split_backward(x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
    """All ranks' parts along `dim`, `length` in all, for what every rank then computes alike."""
    return _GatherForwardSplitBackward.apply(x, axis, dim, length)


def gather_forward_scatter_backward(x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
    """All ranks' parts along `dim`, `length` in all, for matrices that are cut by columns (f)."""
    return _GatherForwardScatterBackward.apply(x, axis, dim, length)


def split_forward_gather_backward(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of what all ranks have; the last parts are padded with zeros."""
    return _SplitForwardGatherBackward.apply(x, axis, dim)


# ---- without gradients: the parts of a tensor --------------------------------------------------------------


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The rank's part along `dim`, ceil(length / size) long, filled up with zeros at the end."""
    return padded(x, axis.size, dim).chunk(axis.size, dim)[axis.rank].contiguous()


def gathered(x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
    """The parts of all ranks side by side along `dim`, without the padding behind `length`."""
    return axis.all_gather(x, dim).narrow(dim, 0, length)


def summed_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The rank's part along `dim` of the sum over ranks."""
    return axis.reduce_scatter(padded(x, axis.size, dim), dim)


def padded(x: Tensor, parts: int, dim: int) -> Tensor:
    """x with zeros at the end of `dim`, so that it can be cut into equal parts."""
    missing = -x.shape[dim] % parts
    if not missing:
        return x
    behind = x.dim() - 1 - dim % x.dim()
    return F.pad(x, [0, 0] * behind + [0, missing])
