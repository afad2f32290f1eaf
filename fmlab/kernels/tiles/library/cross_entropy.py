"""Cross-entropy of logits with a large vocabulary: no row has to fit in SBUF, no probability is written."""

import torch

from fmlab.kernels.tiles.library.shapes import ROWS, pieces
from fmlab.kernels.tiles.run import NeuronCore
from fmlab.kernels.tiles.tile import Hbm, Tile

LOWEST = -3.0e38  # below every logit, and still finite in fp32
CHUNK = 4096  # columns at a time: 8 KiB of each partition in bf16


def cross_entropy(nc: NeuronCore, logits: Hbm, labels: Hbm, chunk: int = CHUNK) -> tuple[Hbm, Hbm]:
    """Loss and log of the normaliser of each row, both (T x 1) in fp32: loss = logsumexp(row) - row[label].

    logits (T x V, finite), labels (T x 1, int32, in 0 … V - 1; for one outside, such as -100, no logit is
    found: mask its row in the result). The maximum and the sum of exponentials are carried over chunks of the
    vocabulary and corrected when a larger logit comes (Milakov and Gimelshein 2018, algorithm 3).
    """
    loss, normaliser = (nc.hbm(labels.shape, torch.float32, name) for name in ("loss", "normaliser"))
    for rows in pieces(logits.shape[0], ROWS):
        label = nc.load(labels[rows], dtype=torch.float32)
        state = [nc.memset(nc.sbuf(label.shape), value) for value in (LOWEST, 0.0, 0.0)]
        columns = pieces(logits.shape[1], chunk)
        for i in nc.sequential_range(len(columns)):
            _add_chunk(nc, nc.load(logits[rows, columns[i]]), columns[i].start, label, state)
        maximum, total, chosen = state
        log = nc.tensor_tensor(nc.activation("log", total), maximum, "add")
        nc.store(normaliser[rows], log)
        difference = nc.tensor_tensor(log, chosen, "subtract")
        nc.store(loss[rows], difference)
    return loss, normaliser


def _add_chunk(nc: NeuronCore, tile: Tile, start: int, label: Tile, state: list[Tile]) -> None:
    """Take one chunk of the vocabulary into (maximum, sum of exponentials, logit of the label)."""
    maximum, total, chosen = state
    largest = nc.tensor_tensor(nc.reduce("max", tile), maximum, "max")
    minus = nc.tensor_scalar(largest, "multiply", -1.0)
    old = nc.activation("exp", maximum, bias=minus)  # what the sum so far shrinks by
    here = nc.sbuf(label.shape)
    nc.activation("exp", tile, bias=minus, total=here, dtype=torch.float32)
    nc.scalar_tensor_tensor(total, "multiply", old, "add", here, out=total)
    nc.copy(largest, out=maximum)
    picked = nc.scalar_tensor_tensor(_positions(nc, tile, start), "equal", label, "multiply", tile)
    nc.tensor_tensor(chosen, nc.reduce("add", picked), "add", out=chosen)


def _positions(nc: NeuronCore, tile: Tile, start: int) -> Tile:
    """The index in the vocabulary of each column of a chunk."""
    return nc.iota(nc.sbuf(tile.shape), base=start)


def cross_entropy_backward(
    nc: NeuronCore, logits: Hbm, labels: Hbm, normaliser: Hbm, scale: float = 1.0, chunk: int = CHUNK
) -> Hbm:
    """Gradient of scale · sum(loss): scale · (softmax(row) - one_hot(label)), in the logits' dtype."""
    gradient = nc.hbm(logits.shape, logits.dtype)
    for rows in pieces(logits.shape[0], ROWS):
        label = nc.load(labels[rows], dtype=torch.float32)
        minus = nc.tensor_scalar(nc.load(normaliser[rows]), "multiply", -1.0)
        for columns in pieces(logits.shape[1], chunk):
            tile = nc.load(logits[rows, columns])
            share = nc.activation("exp", tile, bias=minus, dtype=torch.float32)
            hit = nc.tensor_scalar(_positions(nc, tile, columns.start), "equal", label)
            difference = nc.tensor_tensor(share, hit, "subtract", out=share)
            scaled = nc.tensor_scalar(difference, "multiply", scale, dtype=gradient.dtype)
            nc.store(gradient[rows, columns], scaled)
    return gradient


def cross_entropy_bytes(rows: int, vocabulary: int, itemsize: int = 2) -> int:
    """HBM bytes: logits and labels read once, loss and normaliser written (4 bytes each)."""
    return rows * (vocabulary * itemsize + 12)


def cross_entropy_backward_bytes(rows: int, vocabulary: int, itemsize: int = 2) -> int:
    """HBM bytes: logits, labels, normaliser read once, gradient written."""
    return rows * (2 * vocabulary * itemsize + 8)
