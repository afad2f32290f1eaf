"""Triton kernels as a textbook has them: one idea a file, run on a GPU or, interpreted, on any CPU.

    y = matmul(a, b); softmax(x); layer_norm(x, weight, bias); rms_norm(x, weight)
    cross_entropy(logits, targets); attention(q, k, v, causal=True); bias_gelu(x, bias)
    adamw_step(weight, grad, mean, square, step)

    with count_bytes() as count: matmul(a, b)          what its programs load and store, in bytes
    matmul_bytes(m, n, k, tile_m, tile_n)              the same, predicted
    compile_for(count.launches[0], "sm_90a")           for a GPU that is not there: registers, on-chip memory

All compute in fp32, take fp32, bf16 and fp16, have gradients, and refuse shapes that do not fit. The
interpreter is for reading, testing and counting: it is thousands of times slower than a GPU. Triton is the
extra `kernels`, for Linux.
"""

from importlib import import_module
from typing import Any

from fmlab.extras import require

_LAZY = {
    "TARGETS": "cross_compile",
    "AttentionTile": "flash",
    "Compiled": "cross_compile",
    "Count": "counting",
    "Kernel": "launch",
    "Launch": "counting",
    "Tile": "matrix_product",
    "Traffic": "traffic",
    "adamw_step": "adamw",
    "attention": "flash",
    "attention_backward_bytes": "traffic",
    "attention_bytes": "traffic",
    "bias_gelu": "fused_bias_gelu",
    "compile_for": "cross_compile",
    "count_bytes": "counting",
    "cross_entropy": "fused_cross_entropy",
    "kernel": "launch",
    "layer_norm": "layer_normalisation",
    "matmul": "matrix_product",
    "matmul_bytes": "traffic",
    "rms_norm": "rms_normalisation",
    "softmax": "row_softmax",
    "standard_attention_bytes": "traffic",
}
__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fmlab.kernels.triton' has no attribute {name!r}")
    if _LAZY[name] != "traffic":  # predictions are arithmetic alone
        require("kernels", "triton")
    return getattr(import_module(f"fmlab.kernels.triton.{_LAZY[name]}"), name)
