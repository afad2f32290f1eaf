"""Ring attention: keys and values go round, queries stay (Liu et al. 2023, arXiv:2310.01889).

Each rank holds the queries, keys and values of its columns of every sequence. In step i of n it attends to
the keys of rank r - i while those are already on their way to the next rank, and puts the parts together by
their log-sum-exps. Nobody ever holds the keys of a whole sequence. Under grouped-query attention what
travels are the key/value heads, not copies for each query head.

In the backward pass keys and values go round again, and behind them goes the gradient of each rank's keys
and values, to which every rank on the way adds its part.

Shapes: b batch, h query heads, g key/value heads, l columns of this rank, k head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.models.attention import AttentionMask
from fmlab.parallel.context.mask import Dropped, RingMask, refuse, ring_mask
from fmlab.parallel.context.positions import Tile
from fmlab.parallel.context.tile import attend, gradients, merge_
from fmlab.parallel.mesh import Axis, InFlight


class RingCore:
    """An AttentionCore for queries, keys and values of which each rank of `axis` has its own columns."""

    def __init__(self, axis: Axis, balance: str = "mirrored") -> None:
        self.axis, self.balance = axis, balance

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        dropout: float = 0.0,
        *,
        scale: float | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See AttentionCore; `mask` describes this rank's columns only. Raises ValueError for what it cannot.

        Every rank of the axis calls it, with the same shapes.
        """
        refuse(query, key, mask, dropout, bias)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        view = ring_mask(mask, self.axis, self.balance, query.device)
        return _PassKeysRound.apply(query, key, value, view, scale, view.dropped(dropout, query))


# region travelling
def _packed(key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """One message of both."""
    return torch.cat([key.flatten(), value.flatten()]).to(dtype or key.dtype)


def _unpacked(message: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    first, second = message.split([key.numel(), value.numel()])
    return first.view(key.shape), second.view(value.shape)


# endregion


class _PassKeysRound(torch.autograd.Function):
    """Forward: keys and values go round. Backward: they go round again, their gradients behind them."""

    # region forward
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        view: RingMask,
        scale: float,
        dropped: Dropped | None,
    ) -> Tensor:
        axis, n = view.axis, view.axis.size
        exact = torch.promote_types(query.dtype, torch.float32)
        mixed = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=exact)
        logsumexp = torch.full(query.shape[:3], -float("inf"), dtype=exact, device=query.device)
        message = _packed(key, value)
        for step in range(n):
            source = (axis.rank - step) % n
            arriving = axis.pass_on(message) if step < n - 1 else None
            k, v = _unpacked(message, key, value)
            for tile, limits in view.parts(source, dropped):
                found, of_part = attend(*_part(query, k, v, tile), scale, limits)
                merge_(mixed[:, :, tile.rows], logsumexp[:, :, tile.rows], found, of_part)
            if arriving is not None:
                message = arriving.wait()
        mixed = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, logsumexp)
        ctx.settings = (view, scale, dropped)
        return mixed

    # endregion

    # region backward
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, logsumexp = ctx.saved_tensors
        view, scale, dropped = ctx.settings
        axis, n = view.axis, view.axis.size
        logsumexp = logsumexp.masked_fill(logsumexp == -float("inf"), float("inf"))
        d_query = torch.zeros_like(query, dtype=logsumexp.dtype)
        message = _packed(key, value)
        own = behind = None
        for step in range(n):
            source = (axis.rank - step) % n
            arriving = axis.pass_on(message) if step < n - 1 else None
            k, v = _unpacked(message, key, value)
            found = torch.zeros_like(message, dtype=logsumexp.dtype)
            d_key, d_value = _unpacked(found, key, value)
            for tile, limits in view.parts(source, dropped):
                rows, columns = tile.rows, tile.columns
                whole = (d_mixed[:, :, rows], mixed[:, :, rows], logsumexp[:, :, rows])
                d_q, d_k, d_v = gradients(*whole, *_part(query, k, v, tile), scale, limits)
                d_query[:, :, rows] += d_q
                d_key[:, :, columns] += d_k
                d_value[:, :, columns] += d_v
            if step == 0:
                own = found  # at home already
            else:
                behind = _add_and_pass_on(axis, found, behind)
            if arriving is not None:
                message = arriving.wait()
        assert own is not None
        if behind is not None:
            own += behind.wait()  # what the other ranks have found for this one's keys
        d_key, d_value = _unpacked(own, key, value)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None

    # endregion


def _add_and_pass_on(axis: Axis, found: Tensor, behind: InFlight | None) -> InFlight:
    """Add to the gradient of a rank's keys, which is one step behind them, and send it after them."""
    if behind is not None:
        found += behind.wait()
    return axis.pass_on(found)


def _part(query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    return query[:, :, tile.rows], key[:, :, tile.columns], value[:, :, tile.columns]
