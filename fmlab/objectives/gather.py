"""Rows of all ranks on every rank, with gradients that find their way back.

torch.distributed.all_gather gives tensors without a history: what other ranks make of our rows never reaches
us. The loss is then right and the gradient is not, which no loss curve shows.

Shapes: b rows of this rank, B rows of all ranks, e width.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def gather_rows(rows: Tensor, group: Any = None) -> tuple[Tensor, int]:
    """The rows [b,e] of every rank of `group` (default: all), below each other in the order of ranks: [B,e].

    Every rank calls it. Ranks may hold different numbers of rows. Each rank's backward pass gets back the sum
    of the gradients that all ranks have for its rows.

    Returns the rows, and the number of the first that is ours. Raises ValueError if the ranks' widths differ.
    """
    sizes, width = _sizes(rows, group)
    if len(width) > 1:
        raise ValueError(f"ranks hold rows of different widths: {sorted(width)}")
    gathered: Tensor = _GatherSumGradients.apply(rows, sizes, group)
    return gathered, sum(sizes[: dist.get_rank(group)])


def _sizes(rows: Tensor, group: Any) -> tuple[list[int], set[int]]:
    mine = torch.tensor(rows.shape, device=rows.device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    shapes = torch.stack(every).tolist()
    return [count for count, _ in shapes], {width for _, width in shapes}


class _GatherSumGradients(torch.autograd.Function):
    """Forward: all-gather. Backward: add up all ranks' gradients and keep our rows of the sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        # all_gather needs equal shapes: shorter parts are filled up, and cut again
        padded = rows.new_zeros(max(sizes), rows.shape[1])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor) -> tuple[Tensor, None, None]:
        # A reduce-scatter would send half of this; gloo, the backend of CPUs, has none.
        total = d_gathered.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.sizes)[dist.get_rank(ctx.group)], None, None
