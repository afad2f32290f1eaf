"""Flash attention, backward: probabilities are computed again from the saved normaliser, 128 x 128 at a time.

Dao et al. 2022, algorithm 4. With P the probabilities and dO the gradient of the result:
    dV = Pᵀ dO     dP = dO Vᵀ     dS = P * (dP - rowsum(dO * O)) * scale     dQ = dS K     dK = dSᵀ Q
"""

import math
from dataclasses import dataclass

import torch

from fmlab.kernels.tiles.library.attention import LOWEST, check_heads
from fmlab.kernels.tiles.library.shapes import ROWS, length, pieces, turned
from fmlab.kernels.tiles.run import NeuronCore
from fmlab.kernels.tiles.tile import Hbm, Tile


@dataclass
class _Rows:
    """128 queries of one head, in SBUF: as rows and (t) transposed; dq is summed in place."""

    rows: slice
    q: Tile
    q_t: Tile
    dout: Tile
    dout_t: Tile
    minus_log: Tile
    minus_delta: Tile
    dq: Tile


def flash_attention_backward(
    nc: NeuronCore, q: Hbm, k: Hbm, v: Hbm, out: Hbm, normaliser: Hbm, dout: Hbm, causal: bool = False
) -> tuple[Hbm, Hbm, Hbm]:
    """Gradients of q, k and v, from what flash_attention took and returned and the gradient of its result."""
    check_heads(q, k, v, causal)
    dq, dk, dv = (nc.hbm(one.shape, one.dtype, name) for one, name in ((q, "dq"), (k, "dk"), (v, "dv")))
    for head in range(q.shape[0]):
        queries = [
            _rows(nc, rows, *(one[head, rows] for one in (q, out, normaliser, dout)))
            for rows in pieces(q.shape[1], ROWS)
        ]
        for keys in pieces(k.shape[1], ROWS):
            seers = [one for one in queries if not causal or one.rows.stop > keys.start]
            gradients = _keys(nc, keys, k[head, keys], v[head, keys], seers, causal)
            for place, tile in zip((dk, dv), gradients, strict=True):
                nc.store(place[head, keys], nc.copy(tile, dtype=place.dtype))
        for one in queries:
            nc.store(dq[head, one.rows], nc.copy(one.dq, dtype=dq.dtype))
    return dq, dk, dv


def _rows(nc: NeuronCore, rows: slice, q: Hbm, out: Hbm, normaliser: Hbm, dout: Hbm) -> _Rows:
    query, result, gradient = nc.load(q), nc.load(out), nc.load(dout)
    products = nc.tensor_tensor(gradient, result, "multiply", dtype=torch.float32)
    return _Rows(
        rows,
        query,
        turned(nc, query),
        gradient,
        turned(nc, gradient),
        nc.tensor_scalar(nc.load(normaliser), "multiply", -1.0),
        nc.reduce("add", products, negate=True),
        nc.memset(nc.sbuf(q.shape), 0.0),
    )


def _keys(
    nc: NeuronCore, keys: slice, k: Hbm, v: Hbm, queries: list[_Rows], causal: bool
) -> tuple[Tile, Tile]:
    """dK and dV of 128 keys, summed in PSUM over the queries that see them; dQ of those queries on the
    way."""
    key = nc.load(k)
    key_t, value_t = turned(nc, key), turned(nc, nc.load(v))
    dk, dv = nc.psum(k.shape), nc.psum(v.shape)
    for i, one in enumerate(queries):
        p, ds = _scores(nc, one, key_t, value_t, keys.start, causal)
        nc.matmul(p, one.dout, out=dv, accumulate=i > 0)
        nc.matmul(ds, one.q, out=dk, accumulate=i > 0)
        nc.tensor_tensor(one.dq, nc.matmul(turned(nc, ds), key), "add", out=one.dq)
    return dk, dv


def _scores(
    nc: NeuronCore, one: _Rows, key_t: Tile, value_t: Tile, first_key: int, causal: bool
) -> tuple[Tile, Tile]:
    """P and dS of 128 queries and 128 keys, in the dtype of the inputs."""
    scale, dtype = 1 / math.sqrt(key_t.partitions), one.q.dtype
    scores = nc.matmul(one.q_t, key_t)
    if causal and first_key + key_t.free_size > one.rows.start + 1:
        base = one.rows.start - first_key
        scores = nc.affine_select(nc.copy(scores), base=base, partition=1, step=-1, otherwise=LOWEST)
    p = nc.activation("exp", scores, bias=one.minus_log, scale=scale, dtype=torch.float32)
    dp = nc.matmul(one.dout_t, value_t)
    ds = nc.scalar_tensor_tensor(dp, "add", one.minus_delta, "multiply", p, dtype=torch.float32)
    assert ds.shape == (length(one.rows), key_t.free_size)
    return nc.copy(p, dtype=dtype), nc.tensor_scalar(ds, "multiply", scale, dtype=dtype)


def flash_attention_backward_bytes(heads: int, queries: int, keys: int, depth: int, itemsize: int = 2) -> int:
    """HBM bytes: q, k, v, result and its gradient read once, dq, dk, dv written once, normalisers read."""
    return heads * (4 * (queries + keys) * depth * itemsize + 4 * queries)
