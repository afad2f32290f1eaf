"""Bytes that the kernels load and store, predicted from shapes alone (modelled), and the papers' formulas.

Each is exact for the kernel that it speaks of: tests hold it against the bytes counted in the interpreter
(`fmlab.kernels.triton.count_bytes`). Counted is what programs ask for. On a GPU a cache may answer some of
it, so that memory sees less; what must be loaded once can never be less than the tensors themselves.
"""

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

STATISTIC = 4  # bytes of a log-sum-exp or another number that is kept in fp32


class Traffic(NamedTuple):
    """Bytes loaded and stored by all programs of a call."""

    loaded: int
    stored: int

    @property
    def total(self) -> int:
        return self.loaded + self.stored


def matmul_bytes(m: int, n: int, k: int, tile_m: int, tile_n: int, itemsize: int = 4) -> Traffic:
    """Of a product [m, k] x [k, n] by tiles of tile_m x tile_n of the result.

    A is loaded once for each column of tiles, B once for each row of tiles: m k ceil(n / tile_n) +
    k n ceil(m / tile_m) numbers. The step along k changes nothing.
    """
    _positive(m=m, n=n, k=k, tile_m=tile_m, tile_n=tile_n, itemsize=itemsize)
    loaded = m * k * ceil(n / tile_n) + k * n * ceil(m / tile_m)
    return Traffic(loaded * itemsize, m * n * itemsize)


def keys_seen(queries: int, keys: int, tile_queries: int, tile_keys: int, causal: bool) -> int:
    """Keys that all tiles of queries load together, for one head."""
    seen = 0
    for first in range(0, queries, tile_queries):
        last = min(keys, first + tile_queries) if causal else keys
        seen += min(keys, ceil(last / tile_keys) * tile_keys)
    return seen


def attention_bytes(
    queries: int,
    keys: int,
    width: int,
    tile_queries: int,
    tile_keys: int,
    *,
    heads: int = 1,
    causal: bool = False,
    itemsize: int = 4,
) -> Traffic:
    """Of flash attention, forward: queries and result once, keys and values once for each tile of queries.

    heads: query heads, of all texts together; each loads its keys, shared or not. About
    2 n d + 2 n^2 d / tile_queries numbers a head, and a tile of queries as large as fits in M numbers of
    on-chip memory is proportional to M / d: that is the Theta(N^2 d^2 / M) of Dao et al. 2022, theorem 2.
    """
    _positive(queries=queries, keys=keys, width=width, tile_queries=tile_queries, tile_keys=tile_keys)
    seen = keys_seen(queries, keys, tile_queries, tile_keys, causal)
    loaded = (queries + 2 * seen) * width * itemsize
    stored = queries * width * itemsize + queries * STATISTIC
    return Traffic(heads * loaded, heads * stored)


def attention_backward_bytes(
    queries: int,
    keys: int,
    width: int,
    tile_queries: int,
    tile_keys: int,
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    causal: bool = False,
    itemsize: int = 4,
) -> Traffic:
    """Of the three kernels of the backward pass: row sums, then keys and values, then queries.

    kv_heads: of all texts together; as many as heads without one.
    """
    _positive(queries=queries, keys=keys, width=width, tile_queries=tile_queries, tile_keys=tile_keys)
    kv_heads = heads if kv_heads is None else kv_heads
    row = width * itemsize
    pull = Traffic(2 * queries * row, queries * STATISTIC)
    met = 0  # queries that all tiles of keys load
    for first in range(0, keys, tile_keys):
        met += queries - first // tile_queries * tile_queries if causal else queries
    by_keys = met * 2 * (row + STATISTIC)  # query and gradient of the output; log-sum-exp and row sum
    by_queries = queries * 2 * (row + STATISTIC)
    by_queries += 2 * keys_seen(queries, keys, tile_queries, tile_keys, causal) * row
    loaded = heads * (pull.loaded + by_keys + by_queries) + kv_heads * 2 * keys * row
    stored = heads * (pull.stored + queries * row) + kv_heads * 2 * keys * row
    return Traffic(loaded, stored)


def standard_attention_bytes(
    queries: int, keys: int, width: int, *, heads: int = 1, itemsize: int = 4
) -> Traffic:
    """Of attention with its table in memory (Dao et al. 2022, algorithm 0), forward.

    Load Q and K, store S; load S, store P; load P and V, store O: Theta(N d + N^2).
    """
    _positive(queries=queries, keys=keys, width=width)
    table = queries * keys
    loaded = (queries + 2 * keys) * width + 2 * table
    stored = queries * width + 2 * table
    return Traffic(heads * loaded * itemsize, heads * stored * itemsize)


def rows_bytes(rows: int, columns: int, loads: int, stores: int, itemsize: int = 4) -> Traffic:
    """Of a kernel that loads and stores each number of [rows, columns] so many times."""
    return Traffic(rows * columns * loads * itemsize, rows * columns * stores * itemsize)


def largest_tile(fits: Callable[[int], bool]) -> int:
    """The largest power of two for which `fits` holds; 0 where not even 1 does."""
    size = 0
    while fits(max(1, 2 * size)):
        size = max(1, 2 * size)
    return size


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: give 1 or more")
