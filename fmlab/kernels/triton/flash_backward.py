"""The backward pass of flash attention: weights are made again, tile by tile, from the log-sum-exp.

With P the weights and O = P V: dV = P^T dO, dP = dO V^T, dS = P * (dP - D), dQ = dS K, dK = dS^T Q, where
D = rowsum(dO * O) is what a row's weights cannot all do at once, since they add up to 1 (Dao et al. 2022,
2205.14135, algorithm 4; in two kernels as in Dao 2023, 2307.08691). One kernel holds a tile of keys and
walks over queries for dK and dV; the other holds a tile of queries and walks over keys for dQ. So nothing is
added by two programs at once, and results repeat to the bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmlab.kernels.triton.flash import AttentionTile, padded
from fmlab.kernels.triton.launch import kernel


@kernel
def attention_pull_kernel(out_ptr, dout_ptr, pull_ptr, WIDTH, BLOCK: tl.constexpr):
    """D, one number for each query of each head."""
    row = tl.program_id(0)
    wide = tl.arange(0, BLOCK)
    out = tl.load(out_ptr + row * WIDTH + wide, mask=wide < WIDTH, other=0.0).to(tl.float32)
    d_out = tl.load(dout_ptr + row * WIDTH + wide, mask=wide < WIDTH, other=0.0).to(tl.float32)
    tl.store(pull_ptr + row, tl.sum(out * d_out, axis=0))


@kernel
def attention_keys_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, logsumexp_ptr, pull_ptr, dk_ptr, dv_ptr,
    HEADS, SHARED, QUERIES, KEYS, WIDTH, scale,
    CAUSAL: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys: sums over all queries, of all query heads that share these keys."""
    kv_head = tl.program_id(1)
    kv_heads = HEADS // SHARED
    first_head = kv_head // kv_heads * HEADS + kv_head % kv_heads * SHARED
    columns = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)
    wide = tl.arange(0, BLOCK)
    column_at = kv_head * KEYS * WIDTH + columns[:, None] * WIDTH + wide[None, :]
    column_in = (columns[:, None] < KEYS) & (wide[None, :] < WIDTH)
    k = tl.load(k_ptr + column_at, mask=column_in, other=0.0).to(DOT)
    v = tl.load(v_ptr + column_at, mask=column_in, other=0.0).to(DOT)
    d_k = tl.zeros((TILE_K, BLOCK), dtype=tl.float32)
    d_v = tl.zeros((TILE_K, BLOCK), dtype=tl.float32)
    first = 0
    if CAUSAL:  # earlier queries do not see these keys
        first = tl.program_id(0) * TILE_K // TILE_Q * TILE_Q
    for head in range(first_head, first_head + SHARED):
        for start in range(first, QUERIES, TILE_Q):
            rows = start + tl.arange(0, TILE_Q)
            row_at = head * QUERIES * WIDTH + rows[:, None] * WIDTH + wide[None, :]
            row_in = (rows[:, None] < QUERIES) & (wide[None, :] < WIDTH)
            q = tl.load(q_ptr + row_at, mask=row_in, other=0.0).to(DOT)
            d_out = tl.load(dout_ptr + row_at, mask=row_in, other=0.0).to(DOT)
            # of a row beyond the last: exp(score - inf) = 0, so that it adds nothing
            logsumexp = tl.load(
                logsumexp_ptr + head * QUERIES + rows, mask=rows < QUERIES, other=float("inf")
            )
            pull = tl.load(pull_ptr + head * QUERIES + rows, mask=rows < QUERIES, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            weights = tl.exp(scores - logsumexp[:, None])
            if CAUSAL:
                weights = tl.where(columns[None, :] <= rows[:, None], weights, 0.0)
            d_v = tl.dot(tl.trans(weights.to(DOT)), d_out, d_v, input_precision="ieee")
            d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")
            d_scores = weights * (d_weights - pull[:, None])
            d_k = tl.dot(tl.trans(d_scores.to(DOT)), q, d_k, input_precision="ieee")
    tl.store(dk_ptr + column_at, d_k * scale, mask=column_in)
    tl.store(dv_ptr + column_at, d_v, mask=column_in)


@kernel
def attention_queries_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, logsumexp_ptr, pull_ptr, dq_ptr,
    HEADS, SHARED, QUERIES, KEYS, WIDTH, scale,
    CAUSAL: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries: a sum over the keys that they see."""
    head = tl.program_id(1)
    kv_head = head // HEADS * (HEADS // SHARED) + head % HEADS // SHARED
    rows = tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q)
    wide = tl.arange(0, BLOCK)
    row_at = head * QUERIES * WIDTH + rows[:, None] * WIDTH + wide[None, :]
    row_in = (rows[:, None] < QUERIES) & (wide[None, :] < WIDTH)
    q = tl.load(q_ptr + row_at, mask=row_in, other=0.0).to(DOT)
    d_out = tl.load(dout_ptr + row_at, mask=row_in, other=0.0).to(DOT)
    logsumexp = tl.load(logsumexp_ptr + head * QUERIES + rows, mask=rows < QUERIES, other=float("inf"))
    pull = tl.load(pull_ptr + head * QUERIES + rows, mask=rows < QUERIES, other=0.0)
    d_q = tl.zeros((TILE_Q, BLOCK), dtype=tl.float32)
    last = KEYS
    if CAUSAL:
        last = tl.minimum(KEYS, (tl.program_id(0) + 1) * TILE_Q)
    for start in range(0, last, TILE_K):
        columns = start + tl.arange(0, TILE_K)
        column_at = kv_head * KEYS * WIDTH + columns[:, None] * WIDTH + wide[None, :]
        column_in = (columns[:, None] < KEYS) & (wide[None, :] < WIDTH)
        k = tl.load(k_ptr + column_at, mask=column_in, other=0.0).to(DOT)
        v = tl.load(v_ptr + column_at, mask=column_in, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        weights = tl.exp(scores - logsumexp[:, None])
        seen = columns[None, :] < KEYS
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        weights = tl.where(seen, weights, 0.0)
        d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")
        d_scores = weights * (d_weights - pull[:, None])
        d_q = tl.dot(d_scores.to(DOT), k, d_q, input_precision="ieee")
    tl.store(dq_ptr + row_at, d_q * scale, mask=row_in)


def gradients(
    kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    d_out: Tensor,
    causal: bool,
    scale: float,
    tile: AttentionTile,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, from dO and what the forward pass kept: Q, K, V, O, log-sum-exp; all contiguous."""
    query, key, value, out, logsumexp = kept
    (b, h, n, d), (_, g, s, _) = query.shape, key.shape
    d_query, d_key, d_value = (torch.zeros_like(x) for x in (query, key, value))
    if query.numel() == 0:
        return d_query, d_key, d_value
    pull = torch.empty_like(logsumexp)
    attention_pull_kernel[(b * h * n,)](out, d_out, pull, d, padded(d))
    inputs = (query, key, value, d_out, logsumexp, pull)
    sizes = (h, h // g, n, s, d, scale, causal, tile.queries, tile.keys, padded(d))
    attention_keys_kernel[triton.cdiv(s, tile.keys), b * g](*inputs, d_key, d_value, *sizes)
    attention_queries_kernel[triton.cdiv(n, tile.queries), b * h](*inputs, d_query, *sizes)
    return d_query, d_key, d_value
