"""Tiled matrix multiplication: C (M x N) = A (M x K) @ B (K x N), with A given transposed (K x M).

Both operands of the tensor engine have the contraction in the partition dimension, so A comes as its
transpose. The two kernels differ in one thing: how often a tile that is in SBUF is used before it is gone.
"""

from fmlab.kernels.tiles.errors import refuse
from fmlab.kernels.tiles.library.shapes import COLUMNS, ROWS, length, pieces
from fmlab.kernels.tiles.run import NeuronCore
from fmlab.kernels.tiles.tile import Hbm, Ring


def matmul_naive(nc: NeuronCore, at: Hbm, b: Hbm) -> Hbm:
    """One output tile of 128 x 512 at a time; every product loads both its operands again."""
    c = nc.hbm((at.shape[1], b.shape[1]), at.dtype)
    for m in pieces(at.shape[1], ROWS):
        for n in pieces(b.shape[1], COLUMNS):
            total = nc.psum((length(m), length(n)))
            for k in pieces(at.shape[0], ROWS):
                left, right = nc.load(at[k, m]), nc.load(b[k, n])
                nc.matmul(left, right, out=total, accumulate=k.start > 0)
            result = nc.copy(total, dtype=c.dtype)
            nc.store(c[m, n], result)
    return c


def matmul_blocked(nc: NeuronCore, at: Hbm, b: Hbm, rows: int = 4, columns: int = 2, buffers: int = 2) -> Hbm:
    """A block of `rows` x `columns` output tiles at a time, all of them in PSUM (at most 8 banks).

    For each 128 of the contraction, `rows` tiles of A and `columns` of B come in by one transfer each, and
    make rows x columns products. buffers: places for each of A, B and C, and
    for the sums where PSUM has room; with 1, transfers and engines take turns.
    """
    if not 1 <= rows * columns <= 8:
        refuse(f"rows x columns = {rows} x {columns} output tiles, and PSUM has 8 banks")
    c = nc.hbm((at.shape[1], b.shape[1]), at.dtype)
    a_ring = nc.ring(buffers, (ROWS, rows * ROWS), at.dtype, name="a")
    b_ring = nc.ring(buffers, (ROWS, columns * COLUMNS), b.dtype, name="b")
    c_ring = nc.ring(buffers, (ROWS, COLUMNS), c.dtype, name="c")
    banks = rows * columns
    sums = nc.ring(min(buffers, 8 // banks), (ROWS, banks * COLUMNS), space="PSUM", name="sums")
    for m in pieces(at.shape[1], rows * ROWS):
        for n in pieces(b.shape[1], columns * COLUMNS):
            _block(nc, at[:, m], b[:, n], c[m, n], (a_ring, b_ring, c_ring, sums))
    return c


def _block(nc: NeuronCore, at: Hbm, b: Hbm, c: Hbm, rings: tuple[Ring, ...]) -> None:
    """One block of the output: at (K x m), b (K x n), c (m x n)."""
    a_ring, b_ring, c_ring, sums = rings
    tiles = [(i, j) for i in pieces(c.shape[0], ROWS) for j in pieces(c.shape[1], COLUMNS)]
    banks, place = pieces(len(tiles) * COLUMNS, COLUMNS), sums.next()
    totals = [place[: length(i), bank][:, : length(j)] for bank, (i, j) in zip(banks, tiles, strict=True)]
    for k in pieces(at.shape[0], ROWS):
        a_tile = nc.load(at[k], out=a_ring.next()[: length(k), : c.shape[0]])
        b_tile = nc.load(b[k], out=b_ring.next()[: length(k), : c.shape[1]])
        for (i, j), total in zip(tiles, totals, strict=True):
            nc.matmul(a_tile[:, i], b_tile[:, j], out=total, accumulate=k.start > 0)
    for (i, j), total in zip(tiles, totals, strict=True):
        result = nc.copy(total, out=c_ring.next()[: length(i), : length(j)])
        nc.store(c[i, j], result)


def matmul_bytes(m: int, n: int, k: int, rows: int = 1, columns: int = 1, itemsize: int = 2) -> int:
    """HBM bytes of both kernels (naive: rows = columns = 1): A once for each block column, B for each row.

    Blocks are 128·rows x 512·columns; each element of C is written once.
    """
    across, down = -(-n // (COLUMNS * columns)), -(-m // (ROWS * rows))
    return itemsize * (across * m * k + down * k * n + m * n)
