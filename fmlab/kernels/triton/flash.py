"""Flash attention: exact attention whose table of weights never leaves the chip.

Forward (Dao et al. 2022, 2205.14135, algorithm 1, with the loops in the order of Dao 2023, 2307.08691): a
program holds one tile of queries and walks over the tiles of keys and values. It keeps three things a query:
the largest score so far, the sum of exp(score - largest), and the values mixed so far; a larger score scales
the old ones down. Stored are the mixture and one number a query, the log-sum-exp of its scores, from which
`fmlab.kernels.triton.flash_backward` makes the weights again.

Shapes: q [b, h, n, d], k and v [b, g, s, d] with h a multiple of g (query head i uses key head i // (h / g)).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.kernels.triton import checks
from fmlab.kernels.triton.launch import kernel

WIDEST_HEAD = 256


class AttentionTile(NamedTuple):
    """Queries that a program holds, and keys of a step."""

    queries: int = 64
    keys: int = 64


@kernel
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, logsumexp_ptr, HEADS, SHARED, QUERIES, KEYS, WIDTH, scale,
    CAUSAL: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # region where
    head = tl.program_id(1)  # of all texts: text * HEADS + head
    kv_head = head // HEADS * (HEADS // SHARED) + head % HEADS // SHARED
    rows = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q)
    wide = tl.arange(0, BLOCK)
    row_at = head * QUERIES * WIDTH + rows[:, None] * WIDTH + wide[None, :]
    row_in = (rows[:, None] < QUERIES) & (wide[None, :] < WIDTH)
    # endregion
    # region online softmax
    q = tl.load(q_ptr + row_at, mask=row_in, other=0.0).to(DOT)
    best = tl.full((TILE_Q,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((TILE_Q,), dtype=tl.float32)
    mixed = tl.zeros((TILE_Q, BLOCK), dtype=tl.float32)
    last = KEYS
    if CAUSAL:  # keys behind the tile's last query are not even loaded
        last = tl.minimum(KEYS, (tl.program_id(0) + 1) * TILE_Q)
    for start in range(0, last, TILE_K):
        columns = start + tl.arange(0, TILE_K)
        column_at = kv_head * KEYS * WIDTH + columns[:, None] * WIDTH + wide[None, :]
        column_in = (columns[:, None] < KEYS) & (wide[None, :] < WIDTH)
        k = tl.load(k_ptr + column_at, mask=column_in, other=0.0).to(DOT)
        v = tl.load(v_ptr + column_at, mask=column_in, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = columns[None, :] < KEYS
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        larger = tl.maximum(best, tl.max(scores, axis=1))
        weights, shrink = tl.exp(scores - larger[:, None]), tl.exp(best - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(DOT), v, mixed * shrink[:, None], input_precision="ieee")
        best = larger
    tl.store(out_ptr + row_at, mixed / total[:, None], mask=row_in)
    tl.store(logsumexp_ptr + head * QUERIES + rows, best + tl.log(total), mask=rows < QUERIES)
    # endregion


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    scale: float | None = None,
    tile: AttentionTile | None = None,
) -> Tensor:
    """Attention [b, h, n, d] by tiles, computed in fp32, with gradients; no mask but `causal`.

    scale: of the scores; 1/sqrt(d) without one. Key and value heads may be fewer than query heads.
    tile:  queries and keys of a tile; 64 and 64 without one (32 and 32 for heads wider than 128).

    Raises ValueError for shapes that do not fit, causal attention with another number of keys than queries,
    heads wider than 256, no keys at all, and sides that are no tile's.
    """
    _check(query, key, value, causal)
    width = query.shape[-1]
    if tile is None:
        tile = AttentionTile() if width <= 128 else AttentionTile(32, 32)
    tile = AttentionTile(*tile)
    checks.tile("tile.queries", tile.queries)
    checks.tile("tile.keys", tile.keys)
    scale = width**-0.5 if scale is None else float(scale)
    mixed: Tensor = _TiledAttention.apply(query, key, value, causal, scale, tile)
    return mixed


class _TiledAttention(torch.autograd.Function):
    """Forward: mix the values tile by tile. Backward: make each tile of weights again, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, tile: AttentionTile
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        (b, h, n, d), (_, g, s, _) = query.shape, key.shape
        out, logsumexp = torch.empty_like(query), query.new_empty(b, h, n, dtype=torch.float32)
        if query.numel():
            attention_kernel[triton.cdiv(n, tile.queries), b * h](
                query, key, value, out, logsumexp, h, h // g, n, s, d, scale, causal,
                tile.queries, tile.keys, padded(d),
            )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.settings = (causal, scale, tile)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        from fmlab.kernels.triton.flash_backward import gradients

        return *gradients(ctx.saved_tensors, d_out.contiguous(), *ctx.settings), None, None, None


def padded(width: int) -> int:
    """The power of two, 16 at least, that holds a head; the rest of it is masked."""
    return max(16, triton.next_power_of_2(width))


def _check(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> None:
    checks.same_kind(query=query, key=key, value=value)
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(
            f"query is {list(query.shape)}, key {list(key.shape)}; give [b, h, n, d], [b, g, s, d]"
        )
    (b, h, n, d), (_, g, s, _) = query.shape, key.shape
    checks.shape("key", key, (b, g, s, d), "[b, g, s, d], with b and d of the query")
    checks.shape("value", value, key.shape, "the shape of key")
    if g < 1 or h % g:
        raise ValueError(f"{h} query heads cannot share {g} key heads evenly; give a divisor of {h}")
    if not 1 <= d <= WIDEST_HEAD:
        raise ValueError(f"heads are {d} wide; a tile of them fits on a chip up to {WIDEST_HEAD}")
    if s < 1:
        raise ValueError("there are no keys: attention is a mean over at least one")
    if causal and n != s:
        raise ValueError(f"causal attention is of a text to itself: {n} queries, {s} keys")
