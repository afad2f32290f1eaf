"""Ring attention: keys and values go round, queries stay (Liu et al. 2023, arXiv:2310.01889).

Each rank holds the queries, keys and values of its columns of every sequence. In step i of n it attends to
the keys of rank r - i while those are already on their way to the next rank, and puts the parts together by
their log-sum-exps. Nobody ever holds the keys of a whole sequence. Under grouped-query attention what
travels are the key/value heads, not copies for each query head.

In the backward pass keys and values go round again, and behind them goes the gradient of each rank's keys
and values, to which every rank on the way adds its part.

Shapes: b batch, h query heads, g key/value heads, l columns of this rank, k head width.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.models.attention import AttentionMask
from fmlab.parallel.context.positions import Columns, Tile, columns_of, indices, tiles
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
        return _PassKeysRound.apply(query, key, value, view, scale)


def refuse(query: Tensor, key: Tensor, mask: AttentionMask, dropout: float, bias: Tensor | None) -> None:
    """Raise ValueError for attention whose parts are no attention of a part of the sequence."""
    if bias is not None:
        raise ValueError(
            "a bias added to the scores is a table over whole sequences; context parallelism cuts them. Use "
            "rotary or learned positions, or context=1"
        )
    if dropout:
        raise ValueError(
            "dropout of attention's weights is not divided over ranks; set it to 0, or context=1"
        )
    if mask.prefix is not None:
        raise ValueError(
            "a prefix that sees itself in both directions is not divided over ranks; use context=1"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: context parallelism divides self-attention "
            "only, neither a cache nor attention to another stream"
        )


# region mask
class RingMask(NamedTuple):
    """Who may look at whom, for the columns of all ranks.

    held: the columns of each rank. real, documents: of all ranks, [n,b,l], or None.
    """

    mask: AttentionMask
    held: list[Columns]
    real: Tensor | None
    documents: Tensor | None
    axis: Axis
    device: torch.device

    def parts(self, source: int) -> Iterator[tuple[Tile, Tensor | None]]:
        """What this rank's queries compute with the keys of rank `source`: tiles, and what a tile allows
        (None for all, or a lower triangle)."""
        for tile in tiles(self.held[self.axis.rank], self.held[source], self.mask):
            whole = self.real is None and self.documents is None and not tile.partial
            yield tile, None if whole else self._allowed(tile, source)

    def _allowed(self, tile: Tile, source: int) -> Tensor:
        """Bool [b or 1,1,rows,columns], without the triangle of a diagonal tile."""
        mask, rank = self.mask, self.axis.rank
        shape = (tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start)
        allowed = torch.ones(1, 1, *shape, dtype=torch.bool, device=self.device)
        if tile.partial:
            query = indices(self.held[rank], self.device)[tile.rows]
            key = indices(self.held[source], self.device)[tile.columns]
            if mask.window is not None:
                allowed = allowed & ((query[:, None] - key).abs() < mask.window)
            if mask.blocks is not None:
                allowed = allowed & mask.blocks.allows(query, key)
        if self.real is not None:
            allowed = allowed & self.real[source, :, None, None, tile.columns]
        if self.documents is not None:
            mine, theirs = self.documents[rank, :, tile.rows], self.documents[source, :, tile.columns]
            allowed = allowed & (mine[:, None, :, None] == theirs[:, None, None, :])
        if tile.diagonal:  # a kernel takes a table or a triangle
            allowed = allowed.tril()
        return allowed


# endregion


def ring_mask(mask: AttentionMask, axis: Axis, balance: str, device: torch.device) -> RingMask:
    """What `mask` says of this rank's columns and the others' masks of theirs; made once a forward pass."""
    if "ring" not in mask._made:
        length = mask.queries * axis.size
        held = [columns_of(rank, axis.size, length, balance) for rank in range(axis.size)]
        real = None if mask.real_keys is None else stacked(mask.real_keys.to(torch.uint8), axis).bool()
        documents = None if mask.query_documents is None else stacked(mask.query_documents, axis)
        mask._made["ring"] = RingMask(mask, held, real, documents, axis, device)
    view: RingMask = mask._made["ring"]
    return view


def stacked(tensor: Tensor, axis: Axis) -> Tensor:
    """Every rank's tensor, [n,...]."""
    return axis.all_gather(tensor[None])


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
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, view: RingMask, scale: float) -> Tensor:
        axis, n = view.axis, view.axis.size
        exact = torch.promote_types(query.dtype, torch.float32)
        mixed = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=exact)
        logsumexp = torch.full(query.shape[:3], -float("inf"), dtype=exact, device=query.device)
        message = _packed(key, value)
        for step in range(n):
            source = (axis.rank - step) % n
            arriving = axis.pass_on(message) if step < n - 1 else None
            k, v = _unpacked(message, key, value)
            for tile, allowed in view.parts(source):
                part = _part(query, k, v, tile)
                found, of_part = attend(*part, tile.diagonal and allowed is None, allowed, scale)
                merge_(mixed[:, :, tile.rows], logsumexp[:, :, tile.rows], found, of_part)
            if arriving is not None:
                message = arriving.wait()
        mixed = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, logsumexp)
        ctx.view, ctx.scale = view, scale
        return mixed

    # endregion

    # region backward
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, logsumexp = ctx.saved_tensors
        view, scale = ctx.view, ctx.scale
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
            for tile, allowed in view.parts(source):
                rows, columns = tile.rows, tile.columns
                whole = (mixed[:, :, rows], logsumexp[:, :, rows])
                part = _part(query, k, v, tile)
                d_q, d_k, d_v = gradients(
                    d_mixed[:, :, rows], *part, *whole, tile.diagonal and allowed is None, allowed, scale
                )
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
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None

    # endregion


def _add_and_pass_on(axis: Axis, found: Tensor, behind: InFlight | None) -> InFlight:
    """Add to the gradient of a rank's keys, which is one step behind them, and send it after them."""
    if behind is not None:
        found += behind.wait()
    return axis.pass_on(found)


def _part(query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    return query[:, :, tile.rows], key[:, :, tile.columns], value[:, :, tile.columns]
