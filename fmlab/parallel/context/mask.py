"""Who may look at whom, for the columns of all ranks, and which weights dropout drops.

Shapes: b batch, l columns of a rank, n ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fmlab.models.attention import AttentionMask
from fmlab.models.dropout import Masks, current_masks, draws_masks, next_key, scale_of
from fmlab.parallel.context.positions import Columns, Tile, columns_of, indices, tiles
from fmlab.parallel.context.tile import Limits
from fmlab.parallel.mesh import Axis


def refuse(query: Tensor, key: Tensor, mask: AttentionMask, dropout: float, bias: Tensor | None) -> None:
    """Raise ValueError for attention whose parts are no attention of a part of the sequence."""
    if bias is not None:
        raise ValueError(
            "a bias added to the scores is a table over whole sequences; context parallelism cuts them. Use "
            "rotary or learned positions, or context=1"
        )
    if dropout and not draws_masks():
        raise ValueError(
            "dropout of attention's weights over ranks needs masks that all of them draw alike: an engine's "
            "(fmlab.models.dropout). Run a step of the engine, or model.eval()"
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


@dataclass(frozen=True)
class RingMask:
    """What a rank must know to compute a tile.

    mask: of this rank's columns alone; its order (causal, window, blocks) holds for columns of the whole.
    held: the columns of each rank. real, documents: of all ranks, [n,b,l], or None.
    """

    mask: AttentionMask
    held: list[Columns]
    real: Tensor | None
    documents: Tensor | None
    axis: Axis
    device: torch.device

    # region parts
    def parts(self, source: int, dropped: "Dropped | None" = None) -> Iterator[tuple[Tile, Limits]]:
        """What this rank's queries compute with the keys of rank `source`: tiles, and what limits each."""
        for tile in tiles(self.held[self.axis.rank], self.held[source], self.mask):
            factors = None if dropped is None else dropped.factors(tile, source)
            if self.real is None and self.documents is None and not tile.partial:
                yield tile, Limits(tile.diagonal, None, factors)
            else:  # a kernel takes a triangle or a table
                yield tile, Limits(False, self._allowed(tile, source), factors)

    # endregion

    def _allowed(self, tile: Tile, source: int) -> Tensor:
        """Bool [b or 1,1,rows,columns]."""
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
        return allowed.tril() if tile.diagonal else allowed

    def dropped(self, dropout: float, query: Tensor) -> "Dropped | None":
        """Draws a mask over the weights of the whole, if there is dropout."""
        masks = current_masks() if dropout else None
        if masks is None:
            return None
        exact = torch.promote_types(query.dtype, torch.float32)
        return Dropped(dropout, masks, next_key(), self, query.shape[:2], exact)


@dataclass(frozen=True)
class Dropped:
    """One dropout mask over all weights of attention, of which each rank makes the tiles that it needs."""

    dropout: float
    masks: Masks
    key: int
    view: RingMask
    rows_and_heads: torch.Size
    dtype: torch.dtype

    def factors(self, tile: Tile, source: int) -> Tensor:
        """0 or 1 / (1 - dropout) for each weight of a tile [b,h,rows,columns], the same at every call."""
        held, rank = self.view.held, self.view.axis.rank
        at = {"q": indices(held[rank])[tile.rows], "s": indices(held[source])[tile.columns]}
        shape = torch.Size((*self.rows_and_heads, len(at["q"]), len(at["s"])))
        kept = self.masks.kept(shape, "bhqs", self.dropout, self.view.device, self.key, at)
        return kept.to(self.dtype).mul_(scale_of(self.dropout))


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
