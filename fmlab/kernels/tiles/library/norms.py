"""Layer norm and RMS norm of each row, in one pass over HBM."""

import torch

from fmlab.kernels.tiles.library.shapes import ROWS, length, pieces, spread_row
from fmlab.kernels.tiles.run import NeuronCore
from fmlab.kernels.tiles.tile import Hbm


def rms_norm(nc: NeuronCore, x: Hbm, weight: Hbm, eps: float = 1e-6) -> Hbm:
    """x / sqrt(mean(x²) + eps) * weight, for x (T x N) and weight (N,). Zhang and Sennrich 2019, section
    3."""
    y = nc.hbm(x.shape, x.dtype)
    scale = spread_row(nc, weight)
    for rows in pieces(x.shape[0], ROWS):
        tile = nc.load(x[rows])
        squares = nc.sbuf((length(rows), 1))
        nc.activation("square", tile, total=squares, dtype=torch.float32)
        shifted = nc.tensor_scalar(squares, "multiply", 1 / x.shape[1], "add", eps)
        inverse = nc.activation("rsqrt", shifted)
        scaled = nc.scalar_tensor_tensor(
            tile, "multiply", inverse, "multiply", scale[: length(rows)], dtype=x.dtype
        )
        nc.store(y[rows], scaled)
    return y


def layer_norm(nc: NeuronCore, x: Hbm, weight: Hbm, bias: Hbm, eps: float = 1e-5) -> Hbm:
    """(x - mean) / sqrt(variance + eps) * weight + bias, for x (T x N), weight and bias (N,). Ba et al.
    2016."""
    y = nc.hbm(x.shape, x.dtype)
    scale, shift = spread_row(nc, weight), spread_row(nc, bias)
    for rows in pieces(x.shape[0], ROWS):
        tile, count = nc.load(x[rows]), length(rows)
        minus_sum = nc.reduce("add", tile, negate=True)
        minus_mean = nc.tensor_scalar(minus_sum, "multiply", 1 / x.shape[1])
        centred = nc.activation("copy", tile, bias=minus_mean, dtype=torch.float32)
        squares = nc.sbuf((count, 1))
        nc.activation("square", centred, total=squares)
        shifted = nc.tensor_scalar(squares, "multiply", 1 / x.shape[1], "add", eps)
        inverse = nc.activation("rsqrt", shifted)
        scaled = nc.scalar_tensor_tensor(centred, "multiply", inverse, "multiply", scale[:count])
        moved = nc.tensor_tensor(scaled, shift[:count], "add", dtype=y.dtype)
        nc.store(y[rows], moved)
    return y


def norm_bytes(rows: int, columns: int, vectors: int = 1, itemsize: int = 2) -> int:
    """HBM bytes: x read once, y written once, each vector (RMS norm 1, layer norm 2) read once."""
    return (2 * rows + vectors) * columns * itemsize
