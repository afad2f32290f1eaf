"""Who may look at whom: one description of a mask, whatever it is made of.

Shapes: b batch, h heads, q queries, s keys (the cached ones first), l length of the new tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmlab.models.attention.block_sparse import BlockPattern
from fmlab.models.attention.cache import KVCache
from fmlab.models.state import State


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query may see; built once in a forward pass and shared by every layer.

    With more keys than queries the two are aligned at the END: query i is at position p = i + keys - queries
    of the keys, so that a single query after a cache sees everything before it.

    Args:
        causal: a query sees the keys at 0..p.
        queries, keys: lengths q and s.
        real_keys: bool [b,s], False where a key is padding; None if nothing is.
        query_documents, key_documents: int [b,q] and [b,s]; a query sees only keys of its own document.
        window: a query sees only keys less than this far from p: with `causal` this many, its own included.
        prefix: int [b]; keys before it are seen by every query, whatever causal, window and blocks say: with
            `causal` the prefix looks at itself in both directions (prefix LM).
        blocks: a block-sparse pattern over positions.

    A core that cannot use a dense mask (a ring, a tile kernel) reads these parts, or walks over `tiles()`;
    others call `dense()`. Raises ValueError for parts that cannot be or would do nothing.
    """

    causal: bool
    queries: int
    keys: int
    real_keys: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    window: int | None = None
    prefix: Tensor | None = None
    blocks: BlockPattern | None = None
    _made: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.query_documents is None) != (self.key_documents is None):
            raise ValueError("query_documents and key_documents go together; one of them is missing")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 (a token sees itself), got {self.window}")
        ordered = self.causal or self.window is not None or self.blocks is not None
        if ordered and self.queries > self.keys:
            raise ValueError(
                f"{self.queries} queries and {self.keys} keys: with causal, window or blocks each query is "
                "at the position of a key"
            )
        if self.prefix is not None and not ordered:
            raise ValueError("prefix does nothing in a mask that hides nothing behind it; make it causal")
        if self.blocks is not None and self.blocks.length < self.keys:
            raise ValueError(
                f"blocks covers {self.blocks.length} tokens and there are {self.keys} keys; "
                f"give a layout of at least {-(-self.keys // self.blocks.size)} blocks"
            )

    @property
    def past(self) -> int:
        """Position of the first query among the keys."""
        return self.keys - self.queries

    @property
    def narrow(self) -> bool:
        """True if the window hides anything."""
        return self.window is not None and self.window < self.keys

    @property
    def plain(self) -> bool:
        """True if causality alone decides, or nothing does: no tensor is needed."""
        nothing_else = self.real_keys is None and self.query_documents is None and self.blocks is None
        nothing_else = nothing_else and self.prefix is None and not self.narrow
        return nothing_else and (not self.causal or self.queries in (1, self.keys))

    def tile(self, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """The definition, for queries `rows` and keys `columns`: bool [b or 1, 1, rows, columns]."""
        query = torch.arange(rows.start, rows.stop, device=device) + self.past
        key = torch.arange(columns.start, columns.stop, device=device)
        distance = query[:, None] - key
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            allowed = allowed & (distance.abs() < self.window)
        if self.blocks is not None:
            allowed = allowed & self.blocks.allows(query, key)
        allowed = allowed[None, None]
        if self.prefix is not None:
            allowed = allowed | (key < self.prefix[:, None])[:, None, None, :]
        if self.real_keys is not None:
            allowed = allowed & self.real_keys[:, None, None, columns]
        if self.query_documents is not None and self.key_documents is not None:
            mine, theirs = self.query_documents[:, rows], self.key_documents[:, columns]
            allowed = allowed & (mine[:, None, :, None] == theirs[:, None, None, :])
        return allowed

    def allowed(self, device: torch.device) -> Tensor:
        """Bool [b or 1, 1, q, s], True where the query may see the key."""
        return self.tile(slice(0, self.queries), slice(0, self.keys), device)

    def dense(self, dtype: torch.dtype, device: torch.device, finite: bool = False) -> Tensor:
        """The mask as a term added to the scores: 0 where allowed, -inf elsewhere. Made once per dtype.

        torch converts a boolean mask anew at every call; one conversion serves all the layers.

        Args:
            finite: half of the lowest finite number instead of -inf, from which many accelerators make NaN;
                half, so that adding scores and bias does not overflow. A query that sees nothing then gets
                the mean of all values: who uses this must zero the rows that `blind` names.
        """
        if (dtype, finite) not in self._made:
            allowed = self.allowed(device)
            hidden = torch.finfo(dtype).min / 2 if finite else float("-inf")
            bias = torch.zeros(allowed.shape, dtype=dtype, device=device)
            self._made[dtype, finite] = bias.masked_fill_(~allowed, hidden)
        return self._made[dtype, finite]

    def blind(self, device: torch.device) -> Tensor:
        """Bool [b or 1, 1, q, 1], True where a query may see nothing; made once."""
        if "blind" not in self._made:
            self._made["blind"] = ~self.allowed(device).any(-1, keepdim=True)
        return self._made["blind"]

    def tiles(self, size: int) -> Iterator[tuple[slice, list[slice]]]:
        """Queries, `size` at a time, with the tiles of keys in which one of them may see something.

        Decided without reading a tensor of the device: padding and documents hide no whole tiles here.
        """
        for first in range(0, self.queries, size):
            rows = slice(first, min(first + size, self.queries))
            at = slice(rows.start + self.past, rows.stop + self.past)  # positions of the queries
            start, stop = 0, self.keys
            if self.prefix is None:
                if self.causal:
                    stop = min(stop, at.stop)
                if self.window is not None:
                    start, stop = max(0, at.start - self.window + 1), min(stop, at.stop + self.window - 1)
            tiles = [slice(c, min(c + size, self.keys)) for c in range(start - start % size, stop, size)]
            if self.blocks is not None and self.prefix is None:
                tiles = [columns for columns in tiles if self.blocks.touches(at, columns)]
            yield rows, tiles

    def whole(self, rows: slice, columns: slice) -> bool:
        """True if every pair of this tile is allowed, as far as can be known without reading a tensor."""
        if self.real_keys is not None or self.query_documents is not None or self.blocks is not None:
            return False
        least = rows.start + self.past - (columns.stop - 1)  # distance from key to query
        most = rows.stop - 1 + self.past - columns.start
        near = self.window is None or max(most, -least) < self.window
        return near and (least >= 0 or not self.causal)


def causal_mask(
    state: State, queries: int, padding: str = "attention_mask", window: int | None = None
) -> AttentionMask:
    """The causal mask of this forward pass, from the padding, documents, prefix and cache `state` carries.

    Args:
        padding: name of the [b,l] mask in `state`, 1 real and 0 padding.
        window: see AttentionMask; for models whose layers look back only so far.

    `state` may hold `document_ids` [b,l] and `prefix_lengths` [b], the number of real tokens at the start of
    each row that see each other. Raises ValueError where the cache cannot give what the mask asks for.
    """

    def build() -> AttentionMask:
        real, documents = state.get(padding), state.get("document_ids")
        real = None if real is None else real.bool()
        prefix = state.get("prefix_lengths")
        prefix = None if prefix is None else _prefix_columns(prefix, real)
        cache: KVCache | None = state.cache
        if cache is not None:
            _check_cache(cache, queries, window, prefix)
            prefix = prefix if cache.length == 0 else None  # wholly behind every new query
            real_keys, keys = cache.real_keys(queries), cache.keys(queries)
            return AttentionMask(True, queries, keys, real_keys, window=window, prefix=prefix)
        documents = None if documents is None else document_runs(documents)
        return AttentionMask(True, queries, queries, real, documents, documents, window, prefix)

    return state.once(f"causal {padding} {window}", build)


def _prefix_columns(prefix_lengths: Tensor, real: Tensor | None) -> Tensor:
    """Column behind the last real token of each row's prefix, [b]."""
    if real is None:
        return prefix_lengths
    inside = real.cumsum(-1) < prefix_lengths[:, None]
    return (inside.sum(-1) + 1).where(prefix_lengths > 0, 0)


def _check_cache(cache: KVCache, queries: int, window: int | None, prefix: Tensor | None) -> None:
    if cache.window is not None and (window is None or window > cache.window):
        raise ValueError(
            f"the cache keeps a window of {cache.window} tokens and the layers look back "
            f"{'at everything' if window is None else window}; use a cache that keeps more"
        )
    if prefix is not None and bool((prefix > cache.length + queries).any()):
        raise ValueError(
            "a prefix sees itself in both directions, so the first call with a cache must hold all of it; "
            f"it ends at {int(prefix.max())} and this call at {cache.length + queries}"
        )


def bidirectional_mask(
    state: State, queries: int, padding: str = "attention_mask", window: int | None = None
) -> AttentionMask:
    """Everyone sees every real token: the mask of an encoder. `padding` names the [b,s] mask in `state`.

    `state` may hold `document_ids` [b,l]: everyone then sees the real tokens of its own document.
    """

    def build() -> AttentionMask:
        real, documents = state.get(padding), state.get("document_ids")
        real = None if real is None else real.bool()
        documents = None if documents is None else document_runs(documents)
        return AttentionMask(False, queries, queries, real, documents, documents, window)

    return state.once(f"bidirectional {padding} {window}", build)


def cross_mask(state: State, queries: int, keys: int, padding: str = "attention_mask") -> AttentionMask:
    """Every query of one stream sees every real token of another one, [b,s], whose mask is `padding`."""
    return state.once(f"cross {padding}", lambda: _padding_mask(state, queries, keys, padding))


def _padding_mask(state: State, queries: int, keys: int, padding: str) -> AttentionMask:
    real = state.get(padding)
    return AttentionMask(False, queries, keys, None if real is None else real.bool())


def document_runs(document_ids: Tensor) -> Tensor:
    """Number of the run of equal ids of each token, [b,l]: an id that comes back is a new document.

    An id below 0 is the number of a run already and stays as it is: of a part of a row, runs cannot be told.
    """
    starts = torch.zeros_like(document_ids, dtype=torch.long)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return document_ids.long().where(document_ids < 0, starts.cumsum(-1))


def token_positions(
    input_ids: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None, past: Tensor | None
) -> Tensor:
    """Position of every token, int64 [b,l]: from 0 at the first real token of each row or document.

    Args:
        past: number of real tokens already in the cache, [b], or None.
    """
    if attention_mask is None:
        real_bl = torch.ones_like(input_ids, dtype=torch.long)
    else:
        real_bl = attention_mask.bool().long()
    before_bl = real_bl.cumsum(-1) - real_bl  # real tokens to the left of each token in its row
    if document_ids is not None:
        runs_bl = document_runs(document_ids)
        starts_bl = torch.ones_like(runs_bl, dtype=torch.bool)
        starts_bl[:, 1:] = runs_bl[:, 1:] != runs_bl[:, :-1]
        before_bl = before_bl - before_bl.where(starts_bl, 0).cummax(-1).values
    position_bl = (before_bl + real_bl - 1).clamp(min=0)  # padding: that of the real token before it, or 0
    return position_bl if past is None else position_bl + past[:, None]
