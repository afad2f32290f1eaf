"""Cutting dimensions into tiles, and two moves that several kernels share."""

from collections.abc import Iterator

import torch

from fmlab.kernels.tiles.run import NeuronCore
from fmlab.kernels.tiles.tile import Hbm, Tile

ROWS = 128  # partitions: rows of a tile
COLUMNS = 512  # fp32 numbers of a PSUM bank


def pieces(total: int, size: int) -> list[slice]:
    """Slices of `size` that cover 0 … total; the last may be shorter."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def steps(total: int, size: int) -> Iterator[tuple[int, slice]]:
    """Number and slice of each piece."""
    return enumerate(pieces(total, size))


def length(piece: slice) -> int:
    return int(piece.stop - piece.start)


def spread_row(nc: NeuronCore, row: Hbm) -> Tile:
    """A vector (N,) of HBM in each of the 128 partitions of a tile (128, N) in fp32.

    HBM is read once: the row goes to one partition, and the tensor engine multiplies a column of ones by it.
    """
    n = row.shape[0]
    one_row = nc.load(row[None], dtype=torch.float32)
    ones = nc.memset(nc.sbuf((1, ROWS), torch.float32), 1.0)
    spread = nc.sbuf((ROWS, n), torch.float32)
    for piece in pieces(n, COLUMNS):
        nc.copy(nc.matmul(ones, one_row[:, piece]), out=spread[:, piece])
    return spread


def turned(nc: NeuronCore, tile: Tile) -> Tile:
    """A tile (P, F) transposed to (F, P) in SBUF: through PSUM and back."""
    return nc.copy(nc.transpose(tile), dtype=tile.dtype)
