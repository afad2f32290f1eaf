"""Kernels for the tile machine, each with the formula of the bytes it moves.

run(matmul_blocked, a.T.contiguous(), b, buffers=2).summary()
hbm_bytes(softmax, [(4096, 1024)]) == softmax_bytes(4096, 1024)
"""

from fmlab.kernels.tiles.library.adamw import adamw, adamw_bytes
from fmlab.kernels.tiles.library.attention import flash_attention, flash_attention_bytes
from fmlab.kernels.tiles.library.attention_backward import (
    flash_attention_backward,
    flash_attention_backward_bytes,
)
from fmlab.kernels.tiles.library.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_backward_bytes,
    cross_entropy_bytes,
)
from fmlab.kernels.tiles.library.matmul import matmul_blocked, matmul_bytes, matmul_naive
from fmlab.kernels.tiles.library.norms import layer_norm, norm_bytes, rms_norm
from fmlab.kernels.tiles.library.softmax import (
    softmax,
    softmax_bytes,
    softmax_in_passes,
    softmax_in_passes_bytes,
)

__all__ = [
    "adamw",
    "adamw_bytes",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_bytes",
    "cross_entropy_bytes",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_backward_bytes",
    "flash_attention_bytes",
    "layer_norm",
    "matmul_blocked",
    "matmul_bytes",
    "matmul_naive",
    "norm_bytes",
    "rms_norm",
    "softmax",
    "softmax_bytes",
    "softmax_in_passes",
    "softmax_in_passes_bytes",
]
