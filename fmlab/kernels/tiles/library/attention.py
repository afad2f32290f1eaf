"""Flash attention, forward: scores live in PSUM and SBUF only, HBM sees q, k, v and the result.

Dao et al. 2022, algorithm 1 (with the loop order of Dao 2023, algorithm 1). Shapes: q (H x S x D), k and v
(H x T x D), D <= 128; the softmax is over T. A head's keys and values stay in SBUF.
"""

import math

import torch

from fmlab.kernels.tiles.errors import refuse
from fmlab.kernels.tiles.library.shapes import COLUMNS, ROWS, pieces, turned
from fmlab.kernels.tiles.run import NeuronCore
from fmlab.kernels.tiles.tile import Hbm, Tile

LOWEST = -3.0e38  # below every score, and still finite in fp32
KEYS = 1024  # keys at a time: two PSUM banks of scores, so that engines wait for one another less often


def flash_attention(nc: NeuronCore, q: Hbm, k: Hbm, v: Hbm, causal: bool = False) -> tuple[Hbm, Hbm]:
    """softmax(q kᵀ / sqrt(D)) v, and the log of each row's normaliser (H x S x 1, fp32) for the backward
    pass.

    causal: query i sees keys 0 … i (S = T).
    """
    check_heads(q, k, v, causal)
    out = nc.hbm(q.shape, q.dtype, "out")
    normaliser = nc.hbm((*q.shape[:2], 1), torch.float32, "normaliser")
    for head in range(q.shape[0]):
        keys_t, values = _resident(nc, k[head], v[head])
        for rows in pieces(q.shape[1], ROWS):
            query = nc.load(q[head, rows])
            total, log = _attend(nc, turned(nc, query), keys_t, values, rows.start if causal else None)
            result = nc.copy(total, dtype=q.dtype)
            nc.store(out[head, rows], result)
            nc.store(normaliser[head, rows], log)
    return out, normaliser


def _resident(nc: NeuronCore, k: Hbm, v: Hbm) -> tuple[Tile, list[Tile]]:
    """One head's keys, transposed (D x T), and its values in tiles of 128 rows."""
    keys_t = nc.sbuf((k.shape[1], k.shape[0]), k.dtype)
    for rows in pieces(k.shape[0], ROWS):
        tile = nc.load(k[rows])
        nc.copy(nc.transpose(tile), out=keys_t[:, rows])
    return keys_t, [nc.load(v[rows]) for rows in pieces(v.shape[0], ROWS)]


def _attend(
    nc: NeuronCore, query_t: Tile, keys_t: Tile, values: list[Tile], causal_from: int | None
) -> tuple[Tile, Tile]:
    """128 queries against all keys they see: result and log of the normaliser, both in fp32.

    The running maximum and sums are corrected with each piece of keys; the scores' scale is part of the
    exponential's instruction.
    """
    depth, count = query_t.shape
    seen = keys_t.shape[1] if causal_from is None else causal_from + count
    total = nc.memset(nc.sbuf((count, depth)), 0.0)
    maximum, weight = (nc.memset(nc.sbuf((count, 1)), value) for value in (LOWEST, 0.0))
    turns = pieces(seen, KEYS)
    ahead = _scores(nc, query_t, keys_t[:, turns[0]])
    for i in nc.sequential_range(len(turns)):
        keys, scores = turns[i], ahead
        if i + 1 < len(turns):  # the tensor engine has the next scores ready before it waits for these
            ahead = _scores(nc, query_t, keys_t[:, turns[i + 1]])
        if causal_from is not None and keys.stop > causal_from + 1:
            base = causal_from - keys.start
            scores = nc.copy(scores)  # gpsimd does not reach PSUM
            scores = nc.affine_select(scores, base=base, partition=1, step=-1, otherwise=LOWEST)
        shrink, powers = _softmax_piece(nc, scores, maximum, weight, 1 / math.sqrt(depth), values[0].dtype)
        new = _weighted_values(nc, powers, values[keys.start // ROWS :])
        nc.scalar_tensor_tensor(total, "multiply", shrink, "add", new, out=total)
    result = nc.tensor_scalar(total, "multiply", nc.reciprocal(weight))
    return result, nc.tensor_tensor(nc.activation("log", weight), maximum, "add")


def _scores(nc: NeuronCore, query_t: Tile, keys_t: Tile) -> Tile:
    """queries @ keys: (queries x keys) in PSUM, a bank at a time."""
    scores = nc.psum((query_t.free_size, keys_t.free_size))
    for bank in pieces(keys_t.free_size, COLUMNS):
        nc.matmul(query_t, keys_t[:, bank], out=scores[:, bank])
    return scores


def _softmax_piece(
    nc: NeuronCore, scores: Tile, maximum: Tile, weight: Tile, scale: float, dtype: torch.dtype
) -> tuple[Tile, Tile]:
    """Update maximum and weight with a piece of scores; return the factor for what was summed before, and
    exp(scale · scores - maximum)."""
    largest = nc.tensor_scalar(nc.reduce("max", scores), "multiply", scale, "max", maximum)
    minus = nc.tensor_scalar(largest, "multiply", -1.0)
    shrink = nc.activation("exp", maximum, bias=minus)
    nc.copy(largest, out=maximum)
    here = nc.sbuf(weight.shape)
    powers = nc.activation("exp", scores, bias=minus, scale=scale, total=here, dtype=dtype)
    nc.scalar_tensor_tensor(weight, "multiply", shrink, "add", here, out=weight)
    return shrink, powers


def _weighted_values(nc: NeuronCore, powers: Tile, values: list[Tile]) -> Tile:
    """powers (queries x keys) @ values: the keys become the contraction, so the powers are transposed."""
    product = nc.psum((powers.partitions, values[0].free_size))
    for i, block in enumerate(_turned_blocks(nc, powers)):
        nc.matmul(block, values[i][: block.partitions], out=product, accumulate=i > 0)
    return product


def _turned_blocks(nc: NeuronCore, powers: Tile) -> list[Tile]:
    """Each 128 columns, transposed. Whole blocks share a tile in PSUM, and one copy brings them to SBUF."""
    count, keys = powers.partitions, pieces(powers.free_size, ROWS)
    whole = powers.free_size // ROWS
    blocks = []
    if whole:
        together = nc.psum((ROWS, whole * count))
        for i in range(whole):
            nc.transpose(powers[:, keys[i]], out=together[:, i * count : (i + 1) * count])
        copied = nc.copy(together, dtype=powers.dtype)
        blocks = [copied[:, i * count : (i + 1) * count] for i in range(whole)]
    return blocks + [turned(nc, powers[:, rest]) for rest in keys[whole:]]


def check_heads(q: Hbm, k: Hbm, v: Hbm, causal: bool) -> None:
    """KernelError unless q, k and v are heads that go together."""
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not len(q.shape) == len(k.shape) == len(v.shape) == 3 or k.shape != v.shape:
        refuse(f"q is (heads, S, D), k and v are (heads, T, D); got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[2] > ROWS:
        refuse(f"heads and D agree, and D is at most {ROWS}, the contraction of one matmul; got {shapes}")
    if causal and q.shape[1] != k.shape[1]:
        refuse(f"causal attention has as many queries as keys; got {shapes}")


def flash_attention_bytes(heads: int, queries: int, keys: int, depth: int, itemsize: int = 2) -> int:
    """HBM bytes: q, k, v read once, the result written once, 4 bytes for each row's normaliser."""
    return heads * (2 * (queries + keys) * depth * itemsize + 4 * queries)
