"""Linear attention: weights phi(q) . phi(k) instead of exp(q . k), so that sums over the keys can be kept.

With phi(x) = elu(x) + 1 (Katharopoulos et al. 2020, arXiv:2006.16236, sections 3.2 to 3.4) the output of a
query is phi(q) S / phi(q) z with S the sum of phi(k) v^T and z that of phi(k). Causal attention is a running
sum, a generation a recurrent network whose state never grows. It is another function than softmax attention:
a model must be trained with it.

Shapes: b batch, h query heads, g key/value heads, q queries, s keys, k head width, v value width, c keys of a
chunk, n = (h / g) * c.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.models.attention.mask import AttentionMask

CHUNK = 64


def feature_map(x: Tensor) -> Tensor:
    """elu(x) + 1: positive, so that weights are; the gradient is never 0, as ReLU's would be."""
    return F.elu(x) + 1


def linear_definition(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """The weights of all pairs written out, [b,h,q,s], for any mask: what the fast forms must equal."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    weights_bhqs = feature_map(query) @ feature_map(key).transpose(-1, -2) * mask.allowed(query.device)
    total_bhq1 = weights_bhqs.sum(-1, keepdim=True)
    return weights_bhqs @ value / total_bhq1.masked_fill(total_bhq1 == 0, 1)


class LinearState:
    """All that linear attention remembers of the keys and values so far; its size does not depend on them.

    Args:
        sums: phi(k) v^T summed, [b,g,k,v]. totals: phi(k) summed, [b,g,k,1].
    """

    def __init__(self, sums: Tensor, totals: Tensor):
        self.sums, self.totals = sums, totals

    @classmethod
    def empty(cls, key: Tensor, value: Tensor) -> "LinearState":
        """The state before any token, for keys and values of these shapes."""
        b, g, _, k = key.shape
        return cls(value.new_zeros(b, g, k, value.shape[-1]), key.new_zeros(b, g, k, 1))

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + self.totals.nbytes

    def with_keys(self, features: Tensor, value: Tensor) -> "LinearState":
        """The state after these keys, given as phi(k) [b,g,c,k], and values [b,g,c,v]."""
        turned = features.transpose(-1, -2)
        return LinearState(self.sums + turned @ value, self.totals + turned.sum(-1, keepdim=True))

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, "LinearState"]:
        """One token: its output [b,h,1,v] and the state after it. The recurrent form of `linear_core`."""
        state = self.with_keys(feature_map(key), value)
        return _read(_fold(feature_map(query), key.shape[1]), state, query.shape[1]), state


def linear_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Linear attention [b,h,q,v] in the place of an AttentionCore, chunk by chunk, linear in q and s.

    Takes causal or bidirectional masks with padding. Raises ValueError for what it cannot do: a scale, a bias
    or dropout of weights that are never made, and masks that would have to take keys out of a sum again.
    """
    _check(mask, dropout, scale, bias, chunk)
    features = feature_map(key)
    if mask.real_keys is not None:
        features = features * mask.real_keys[:, None, :, None]
    state, queries = LinearState.empty(key, value), feature_map(query)
    if not mask.causal:
        state = state.with_keys(features, value)
        return _read(_fold(queries, key.shape[1]), state, query.shape[1])
    past = mask.past  # keys that every query sees
    state = state.with_keys(features[:, :, :past], value[:, :, :past])
    outputs = []
    for start in range(0, mask.queries, chunk):
        rows = slice(start, min(start + chunk, mask.queries))
        seen = slice(past + rows.start, past + rows.stop)
        q_bgnk, own = _fold(queries[:, :, rows], key.shape[1]), (features[:, :, seen], value[:, :, seen])
        outputs.append(_read(q_bgnk, state, query.shape[1], own))
        state = state.with_keys(*own)
    return torch.cat(outputs, 2)


def _fold(x_bhck: Tensor, g: int) -> Tensor:
    """[b,h,c,k] -> [b,g,n,k]: the queries that share a key/value head, one head after the other."""
    return x_bhck.reshape(x_bhck.shape[0], g, -1, x_bhck.shape[-1])


def _read(q_bgnk: Tensor, state: LinearState, heads: int, own: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Outputs [b,h,c,v] of queries that see all of `state` and, of their own chunk of phi(k) and values, what
    is not after them."""
    sums, totals = q_bgnk @ state.sums, q_bgnk @ state.totals
    if own is not None:
        k_bgck, v_bgcv = own
        c, n = k_bgck.shape[2], q_bgnk.shape[2]
        causal = torch.ones(c, c, dtype=torch.bool, device=k_bgck.device).tril().repeat(n // c, 1)
        weights = (q_bgnk @ k_bgck.transpose(-1, -2)) * causal
        sums, totals = sums + weights @ v_bgcv, totals + weights.sum(-1, keepdim=True)
    mixed = sums / totals.masked_fill(totals == 0, 1)
    return mixed.reshape(mixed.shape[0], heads, -1, mixed.shape[-1])


def _check(mask: AttentionMask, dropout: float, scale: float | None, bias: Tensor | None, chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    refused = {
        "dropout": bool(dropout),
        "scale": scale is not None,
        "bias": bias is not None,
        "documents": mask.query_documents is not None,
        "window": mask.narrow,
        "prefix": mask.prefix is not None,
        "blocks": mask.blocks is not None,
    }
    if given := [name for name, present in refused.items() if present]:
        raise ValueError(
            f"linear attention keeps sums over the keys, not weights, and cannot do: {', '.join(given)}; "
            "legal are causal or bidirectional masks with padding (or take linear_definition)"
        )
