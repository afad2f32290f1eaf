"""One AdamW step in one pass over HBM: seven tensors move, nothing else does."""

import math

from fmlab.kernels.tiles.library.shapes import ROWS, pieces
from fmlab.kernels.tiles.run import NeuronCore
from fmlab.kernels.tiles.tile import Hbm


def adamw(
    nc: NeuronCore, parameter: Hbm, gradient: Hbm, first: Hbm, second: Hbm, *, step: int, lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01, columns: int =
    2048,
) -> tuple[Hbm, Hbm, Hbm]:  # fmt: skip
    """New parameter, first and second moment (each R x C, fp32). Loshchilov and Hutter 2019, algorithm 2.

    step counts from 1. `columns` at a time: seven tiles of 8 KiB a partition live at once.
    """
    outputs = [nc.hbm(parameter.shape, parameter.dtype, name) for name in ("parameter", "first", "second")]
    beta1, beta2 = betas
    rate, shrink = lr / (1 - beta1**step), 1 / (1 - beta2**step)
    for rows in pieces(parameter.shape[0], ROWS):
        for part in pieces(parameter.shape[1], columns):
            p, g, m, v = (nc.load(one[rows, part]) for one in (parameter, gradient, first, second))
            fresh = nc.tensor_scalar(g, "multiply", 1 - beta1)
            m = nc.scalar_tensor_tensor(m, "multiply", beta1, "add", fresh, out=m)
            square = nc.activation("square", g, scale=math.sqrt(1 - beta2), out=fresh)
            v = nc.scalar_tensor_tensor(v, "multiply", beta2, "add", square, out=v)
            root = nc.activation("sqrt", v, scale=shrink, out=g)
            inverse = nc.reciprocal(nc.tensor_scalar(root, "add", eps, out=g), out=g, engine="scalar")
            change = nc.scalar_tensor_tensor(m, "multiply", rate, "multiply", inverse, out=fresh)
            p = nc.scalar_tensor_tensor(p, "multiply", 1 - lr * weight_decay, "subtract", change, out=p)
            for output, tile in zip(outputs, (p, m, v), strict=True):
                nc.store(output[rows, part], tile)
    return tuple(outputs)  # type: ignore[return-value]


def adamw_bytes(elements: int, itemsize: int = 4) -> int:
    """HBM bytes: parameter, gradient and two moments read, three of them written."""
    return 7 * elements * itemsize
