"""Attention by tiles with an online softmax: exact, without ever holding the table of weights.

The flash algorithm (Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4; the online softmax is of Milakov
and Gimelshein 2018, arXiv:1805.02867), in plain PyTorch for reading and for measuring. A tile of queries
walks over the tiles of keys and keeps three things a row: the largest score so far, the sum of exp(score -
largest), and the values mixed so far; when a larger score turns up, sum and mixture are scaled down. For the
backward pass it keeps one number a row, the log-sum-exp of its scores, from which each tile of weights is
made again.

Shapes: b batch, h query heads, g key/value heads, q queries, s keys, k head width, r queries of a tile,
c keys of a tile, n = (h / g) * r.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.models.attention.mask import AttentionMask
from fmlab.models.dropout import current_masks, next_key, scale_of
from fmlab.models.functions import without_autocast

TILE = 128  # queries and keys of a tile


def flash_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """Attention by tiles of `tile` queries and keys; see AttentionCore.

    Tiles that causality, a window or a block pattern hides are skipped. 16-bit inputs are computed in fp32.
    Memory grows with q + s; only a bias, which comes as a table, is as large as q * s.
    """
    if tile < 1:
        raise ValueError(f"tile must be at least 1 query and key, got {tile}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kept = _Kept(dropout, query.shape[2], key.shape[2]) if dropout else None
    return _TiledAttention.apply(query, key, value, bias, mask, scale, tile, kept)


class _TiledAttention(torch.autograd.Function):
    """Forward: mix the values tile by tile. Backward: make each tile of weights again, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        mask: AttentionMask,
        scale: float,
        tile: int,
        kept: "_Kept | None",
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        mixed = query.new_zeros(*query.shape[:3], value.shape[-1])
        logsumexp = torch.full((*query.shape[:3], 1), float("inf"), dtype=exact, device=query.device)
        with without_autocast(query):
            # region online softmax
            for rows, tiles in mask.tiles(tile):
                q = query[:, :, rows].to(exact)
                best = torch.full((*q.shape[:3], 1), -float("inf"), dtype=exact, device=q.device)
                total, sums = torch.zeros_like(best), q.new_zeros(*q.shape[:3], value.shape[-1])
                for columns in tiles:
                    scores = _scores(q, key, bias, mask, scale, rows, columns)
                    larger = torch.maximum(best, scores.amax(-1, keepdim=True))
                    shift = larger.masked_fill(larger == -float("inf"), 0)  # of rows that saw nothing yet
                    weights, shrink = scores.sub_(shift).exp_(), (best - shift).exp_()
                    total = total * shrink + weights.sum(-1, keepdim=True)
                    if kept is not None:
                        weights *= kept.factors(weights, rows, columns)
                    sums = sums * shrink + _times(weights, value[:, :, columns].to(exact))
                    best = larger
                blind = total == 0
                mixed[:, :, rows] = (sums / total.masked_fill(blind, 1)).to(mixed.dtype)
                # endregion
                # of a row that sees nothing +inf: all its weights, exp(score - inf), will be 0 again
                logsumexp[:, :, rows] = (best + total.log()).masked_fill(blind, float("inf"))
        ctx.save_for_backward(query, key, value, bias, mixed, logsumexp)
        ctx.settings = (mask, scale, tile, kept)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, mixed, logsumexp = ctx.saved_tensors
        mask, scale, tile, kept = ctx.settings
        exact = logsumexp.dtype
        d_query = torch.zeros_like(query)
        d_key, d_value = (torch.zeros_like(x, dtype=exact) for x in (key, value))
        d_bias = torch.zeros_like(bias, dtype=exact) if ctx.needs_input_grad[3] else None
        with without_autocast(query):
            for rows, tiles in mask.tiles(tile):
                q, d_out = query[:, :, rows].to(exact), d_mixed[:, :, rows].to(exact)
                # sum over keys of weight * d_weight, by way of the output: no pass over the keys is needed
                pull = (d_out * mixed[:, :, rows]).sum(-1, keepdim=True)
                d_q = torch.zeros_like(q)
                for columns in tiles:
                    k, v = key[:, :, columns].to(exact), value[:, :, columns].to(exact)
                    scores = _scores(q, key, bias, mask, scale, rows, columns)
                    weights = scores.sub_(logsumexp[:, :, rows]).exp_()
                    d_weights = _times(d_out, v.transpose(-1, -2))
                    if kept is not None:
                        factors = kept.factors(weights, rows, columns)
                        d_weights *= factors
                        d_value[:, :, columns] += _gathered(weights * factors, d_out, len_g=key.shape[1])
                    else:
                        d_value[:, :, columns] += _gathered(weights, d_out, len_g=key.shape[1])
                    d_scores = d_weights.sub_(pull).mul_(weights)
                    if d_bias is not None:
                        part = d_bias[:, :, rows, columns]
                        part += d_scores.sum_to_size(part.shape)
                    d_q += _times(d_scores, k)
                    d_key[:, :, columns] += _gathered(d_scores, q, len_g=key.shape[1])
                d_query[:, :, rows] = (d_q * scale).to(query.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_query, (d_key * scale).to(key.dtype), d_value.to(value.dtype), d_bias, *[None] * 4


def _scores(
    q: Tensor,
    key: Tensor,
    bias: Tensor | None,
    mask: AttentionMask,
    scale: float,
    rows: slice,
    columns: slice,
) -> Tensor:
    """Scores of a tile [b,h,r,c], -inf where the mask hides the key; a new tensor."""
    scores = _times(q, key[:, :, columns].to(q.dtype).transpose(-1, -2)).mul_(scale)
    if bias is not None:
        scores += bias[:, :, rows, columns]
    if not mask.whole(rows, columns):
        scores.masked_fill_(~mask.tile(rows, columns, q.device), -float("inf"))
    return scores


def _times(left_bhrx: Tensor, right_bgxy: Tensor) -> Tensor:
    """The product [b,h,r,y] of each query head with its key/value head, which is shared, not copied."""
    b, h, r, x = left_bhrx.shape
    g = right_bgxy.shape[1]
    return (left_bhrx.reshape(b, g, h // g * r, x) @ right_bgxy).view(b, h, r, -1)


def _gathered(left_bhrc: Tensor, right_bhrx: Tensor, len_g: int) -> Tensor:
    """left^T right [b,g,c,x], summed over the query heads of each key/value head."""
    left_bgnc, right_bgnx = (x.reshape(x.shape[0], len_g, -1, x.shape[-1]) for x in (left_bhrc, right_bhrx))
    return left_bgnc.transpose(-1, -2) @ right_bgnx


class _Kept:
    """Dropout's factors of a tile, 0 or 1 / (1 - dropout): the same forward and backward."""

    def __init__(self, dropout: float, queries: int, keys: int) -> None:
        self.dropout, self.masks = dropout, current_masks()
        if self.masks is None:
            self.seed = int(torch.randint(2**62, (), device="cpu"))
        else:
            self.seed = next_key()
            self.queries, self.keys = self.masks.numbers_of("q", queries), self.masks.numbers_of("s", keys)

    def factors(self, weights: Tensor, rows: slice, columns: slice) -> Tensor:
        """For weights [b,h,r,c] of the queries `rows` and the keys `columns`."""
        if self.masks is not None:
            at = {"q": self.queries[rows], "s": self.keys[columns]}
            kept = self.masks.kept(weights.shape, "bhqs", self.dropout, weights.device, self.seed, at)
            return kept.to(weights.dtype).mul_(scale_of(self.dropout))
        generator = torch.Generator(weights.device)
        generator.manual_seed((self.seed + rows.start * 1_000_003 + columns.start) % 2**63)
        kept = torch.empty_like(weights).bernoulli_(1 - self.dropout, generator=generator)
        return kept.div_(1 - self.dropout)
