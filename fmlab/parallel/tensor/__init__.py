"""Tensor parallelism: every matrix is divided among ranks, which work on the same tokens together.

A pair of matrices is cut so that what lies between them needs no message: the first by columns (heads, hidden
units), the second by rows (Shoeybi et al. 2019, arXiv:1909.08053). f stands before the pair and g behind it:

    functions      f and g, also over positions
    linears        products with a part of a matrix, f's message behind the weight's gradient
    modules        the layers that take the place of Linear and Embedding
    cross_entropy  the loss over a divided vocabulary
    sequence       the stream between the pairs, divided by positions (sequence parallelism)
    divide         from a model's plan to its parts
    check          what is refused
    cost           what travels
"""

from fmlab.parallel.tensor.check import legal_degrees
from fmlab.parallel.tensor.cross_entropy import VocabParallelCrossEntropy
from fmlab.parallel.tensor.divide import apply
from fmlab.parallel.tensor.functions import copy_forward_sum_backward, sum_forward_copy_backward
from fmlab.parallel.tensor.modules import ColumnLinear, RowLinear, VocabEmbedding, VocabLinear

__all__ = [
    "ColumnLinear",
    "RowLinear",
    "VocabEmbedding",
    "VocabLinear",
    "VocabParallelCrossEntropy",
    "apply",
    "copy_forward_sum_backward",
    "legal_degrees",
    "sum_forward_copy_backward",
]
