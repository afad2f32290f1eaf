"""Who may look at whom: one description of a mask, whatever it is made of.

Shapes: b batch, h heads, q queries, s keys (the cached ones first), l length of the new tokens.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fmlab.models.attention.cache import KVCache
from fmlab.models.state import State


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query may see; built once in a forward pass and shared by every layer.

    Args:
        causal: query i sees keys 0..i. With more keys than queries the two are aligned at the END, so that a
            single query after a cache sees everything before it.
        queries, keys: lengths q and s.
        real_keys: bool [b,s], False where a key is padding; None if nothing is.
        query_documents, key_documents: int [b,q] and [b,s]; a query sees only keys of its own document.

    A core that cannot use a dense mask (a ring, a tile kernel) reads these parts; others call `dense()`.
    """

    causal: bool
    queries: int
    keys: int
    real_keys: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    _made: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def plain(self) -> bool:
        """True if causality alone decides, or nothing does: no tensor is needed."""
        nothing_else = self.real_keys is None and self.query_documents is None
        return nothing_else and (not self.causal or self.queries in (1, self.keys))

    def allowed(self, device: torch.device) -> Tensor:
        """Bool [b or 1, 1, q, s], True where the query may see the key."""
        allowed = torch.ones(self.queries, self.keys, dtype=torch.bool, device=device)
        if self.causal:
            allowed = allowed.tril(self.keys - self.queries)
        allowed = allowed[None, None]
        if self.real_keys is not None:
            allowed = allowed & self.real_keys[:, None, None, :]
        if self.query_documents is not None:
            assert self.key_documents is not None
            same = self.query_documents[:, None, :, None] == self.key_documents[:, None, None, :]
            allowed = allowed & same
        return allowed

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The mask as a term added to the scores: 0 where allowed, -inf elsewhere. Made once per dtype.

        torch converts a boolean mask anew at every call; one conversion serves all the layers.
        """
        if dtype not in self._made:
            allowed = self.allowed(device)
            bias = torch.zeros(allowed.shape, dtype=dtype, device=device)
            self._made[dtype] = bias.masked_fill_(~allowed, float("-inf"))
        return self._made[dtype]


def causal_mask(state: State, queries: int, padding: str = "attention_mask") -> AttentionMask:
    """The causal mask of this forward pass, from the padding, documents and cache that `state` carries."""

    def build() -> AttentionMask:
        cache: KVCache | None = state.cache
        if cache is not None:
            keys = cache.length + queries
            return AttentionMask(True, queries, keys, cache.real[:, :keys] if cache.padded else None)
        real = state.get(padding)
        documents = state.get("document_ids")
        documents = None if documents is None else document_runs(documents)
        real = None if real is None else real.bool()
        return AttentionMask(True, queries, queries, real, documents, documents)

    return state.once(f"causal {padding}", build)


def bidirectional_mask(state: State, queries: int, padding: str = "attention_mask") -> AttentionMask:
    """Everyone sees every real token: the mask of an encoder. `padding` names the [b,s] mask in `state`."""
    return state.once(f"bidirectional {padding}", lambda: _padding_mask(state, queries, queries, padding))


def cross_mask(state: State, queries: int, keys: int, padding: str = "attention_mask") -> AttentionMask:
    """Every query of one stream sees every real token of another one, [b,s], whose mask is `padding`."""
    return state.once(f"cross {padding}", lambda: _padding_mask(state, queries, keys, padding))


def _padding_mask(state: State, queries: int, keys: int, padding: str) -> AttentionMask:
    real = state.get(padding)
    return AttentionMask(False, queries, keys, None if real is None else real.bool())


def document_runs(document_ids: Tensor) -> Tensor:
    """Number of the run of equal ids of each token, [b,l]: an id that comes back is a new document."""
    starts = torch.zeros_like(document_ids, dtype=torch.long)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts.cumsum(-1)


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
