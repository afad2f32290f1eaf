"""Softmax of each row, in one pass over HBM."""

import torch

from fmlab.kernels.tiles.library.shapes import ROWS, length, pieces
from fmlab.kernels.tiles.run import NeuronCore
from fmlab.kernels.tiles.tile import Hbm


def softmax(nc: NeuronCore, x: Hbm) -> Hbm:
    """softmax(x) along the last dimension of x (T x N); a whole row has to fit in SBUF.

    The scalar engine subtracts the maximum, takes the exponential and sums it in one instruction.
    """
    y = nc.hbm(x.shape, x.dtype)
    for rows in pieces(x.shape[0], ROWS):
        tile = nc.load(x[rows])
        minus_max = nc.reduce("max", tile, negate=True)
        total = nc.sbuf((length(rows), 1))
        powers = nc.activation("exp", tile, bias=minus_max, total=total, dtype=torch.float32)
        shares = nc.tensor_scalar(powers, "multiply", nc.reciprocal(total), dtype=y.dtype)
        nc.store(y[rows], shares)
    return y


def softmax_in_passes(nc: NeuronCore, x: Hbm) -> Hbm:
    """The same as two kernels that follow one another: powers go to HBM and come back."""
    powers, y = nc.hbm(x.shape, x.dtype, "powers"), nc.hbm(x.shape, x.dtype, "y")
    totals = nc.hbm((x.shape[0], 1), torch.float32, "totals")
    for rows in pieces(x.shape[0], ROWS):
        tile = nc.load(x[rows])
        minus_max, total = nc.reduce("max", tile, negate=True), nc.sbuf((length(rows), 1))
        power = nc.activation("exp", tile, bias=minus_max, total=total)
        nc.store(powers[rows], power)
        nc.store(totals[rows], total)
    for rows in pieces(x.shape[0], ROWS):
        tile, total = nc.load(powers[rows]), nc.load(totals[rows])
        share = nc.tensor_scalar(tile, "multiply", nc.reciprocal(total))
        nc.store(y[rows], share)
    return y


def softmax_bytes(rows: int, columns: int, itemsize: int = 2) -> int:
    """HBM bytes: x read once, y written once."""
    return 2 * rows * columns * itemsize


def softmax_in_passes_bytes(rows: int, columns: int, itemsize: int = 2) -> int:
    """HBM bytes: twice as many, and the totals (4 bytes a row) there and back."""
    return 2 * softmax_bytes(rows, columns, itemsize) + 8 * rows
