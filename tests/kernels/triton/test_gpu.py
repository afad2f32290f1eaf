"""The same kernels compiled, on a GPU: equal to their definitions, tiles tried, nothing counted."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton, the extra `kernels`, is for Linux only")
from fmlab.kernels import triton as ft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch sees"),
]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_equals_its_definition(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    within = 1e-5 if dtype == torch.float32 else 1e-2
    x, weight, bias = randn(67, 333, dtype=dtype), randn(333, dtype=dtype), randn(333, dtype=dtype)
    q, k, v = (randn(2, heads, 75, 40, dtype=dtype) for heads in (4, 2, 2))
    targets = torch.arange(67, device="cuda")
    cases = [
        (ft.matmul, torch.matmul, (x, randn(333, 45, dtype=dtype))),
        (ft.softmax, lambda x: x.softmax(-1), (x,)),
        (ft.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), (x, weight, bias)),
        (ft.rms_norm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), (x, weight)),
        (ft.bias_gelu, lambda x, b: F.gelu(x + b), (x, bias)),
        (
            lambda x: ft.cross_entropy(x, targets),
            lambda x: F.cross_entropy(x, targets, reduction="none"),
            (x,),
        ),
        (
            lambda q, k, v: ft.attention(q, k, v, causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            (q, k, v),
        ),
    ]
    for ours, definition, inputs in cases:
        exact = [one.detach().double().requires_grad_() for one in inputs]
        mine, right = ours(*inputs), definition(*exact)
        d_out = torch.randn_like(right)
        pairs = [(mine, right)]
        pairs += zip(
            torch.autograd.grad(mine, inputs, d_out.to(mine.dtype)),
            torch.autograd.grad(right, exact, d_out),
            strict=True,
        )
        for found, true in pairs:
            assert (found.double() - true).norm() <= within * true.norm()


def test_bytes_are_not_counted_on_a_gpu() -> None:
    with ft.count_bytes(), pytest.raises(ValueError, match="counted in the interpreter"):
        ft.softmax(torch.ones(2, 8, device="cuda"))
