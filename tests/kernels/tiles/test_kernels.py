"""The ready kernels: equal to torch in the dtypes of the hardware, and HBM bytes equal to their formulas."""

import pytest
import torch
from torch.nn import functional as F

from fmlab.kernels.tiles import hbm_bytes, library, run

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error, in the norm of the wanted."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(
    ("kernel", "blocks", "options"),
    [
        (library.matmul_naive, (1, 1), {}),
        (library.matmul_blocked, (2, 2), {"rows": 2, "columns": 2, "buffers": 1}),
        (library.matmul_blocked, (4, 2), {"buffers": 2}),
    ],
)
@pytest.mark.parametrize("shape", [(256, 1024, 256), (200, 700, 300)])
def test_matmul(kernel, blocks, options, shape) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k).to(BF16), torch.randn(k, n).to(BF16)
    done = run(kernel, a.T.contiguous(), b, **options)
    assert error(done.output, a.double() @ b.double()) < 3e-3  # one rounding to bf16
    assert done.hbm_bytes == library.matmul_bytes(m, n, k, *blocks)
    assert done.flops == 2 * m * n * k
    assert hbm_bytes(kernel, [(k, m), (k, n)], **options) == done.hbm_bytes


def test_products_are_summed_in_fp32() -> None:
    a = torch.full((128, 4096), 0.01).to(BF16)
    done = run(library.matmul_blocked, a.T.contiguous(), torch.ones(4096, 512, dtype=BF16))
    assert done.output[0, 0] == (a.double().sum(dim=1)[0]).to(BF16)


def test_blocks_and_double_buffers_are_what_makes_it_fast() -> None:
    def modelled(kernel, **options):
        shapes = [torch.empty(1024, 1024, dtype=BF16, device="meta") for _ in range(2)]
        return run(kernel, *shapes, dry=True, **options)

    naive = modelled(library.matmul_naive)
    single, double = (modelled(library.matmul_blocked, buffers=n) for n in (1, 2))
    assert naive.seconds > 1.3 * single.seconds > 1.3 * 1.5 * double.seconds
    assert single.hbm_bytes == double.hbm_bytes < naive.hbm_bytes / 2.5
    assert double.seconds >= double.roofline_seconds
    assert double.peak_sbuf == 2 * single.peak_sbuf


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (BF16, 4e-3)])
def test_softmax(dtype, bound) -> None:
    x = (8 * torch.randn(200, 700)).to(dtype)
    done = run(library.softmax, x)
    assert error(done.output, torch.softmax(x.double(), dim=1)) < bound
    assert done.output.dtype == dtype
    assert done.hbm_bytes == library.softmax_bytes(200, 700, dtype.itemsize)
    passes = run(library.softmax_in_passes, x)
    assert error(passes.output, torch.softmax(x.double(), dim=1)) < 2 * bound
    assert passes.hbm_bytes == library.softmax_in_passes_bytes(200, 700, dtype.itemsize)
    assert passes.seconds > 1.5 * done.seconds


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (BF16, 4e-3)])
def test_norms(dtype, bound) -> None:
    x = (3 + torch.randn(200, 700)).to(dtype)
    weight, bias = torch.randn(700).to(dtype), torch.randn(700).to(dtype)
    layer = run(library.layer_norm, x, weight, bias)
    wanted = F.layer_norm(x.double(), (700,), weight.double(), bias.double())
    assert error(layer.output, wanted) < bound
    assert layer.hbm_bytes == library.norm_bytes(200, 700, 2, dtype.itemsize)
    rms = run(library.rms_norm, x, weight)
    assert error(rms.output, F.rms_norm(x.double(), (700,), weight.double(), 1e-6)) < bound
    assert rms.hbm_bytes == library.norm_bytes(200, 700, 1, dtype.itemsize)


def test_cross_entropy_and_its_gradient_in_chunks() -> None:
    logits = (5 * torch.randn(150, 1003)).requires_grad_()
    labels = torch.randint(0, 1003, (150, 1), dtype=torch.int32)
    wanted = F.cross_entropy(logits.double(), labels[:, 0].long(), reduction="none")
    (wanted.sum() / 150).backward()
    forward = run(library.cross_entropy, logits, labels, chunk=256)
    loss, normaliser = forward.output
    assert error(loss[:, 0], wanted.detach()) < 1e-6
    assert forward.hbm_bytes == library.cross_entropy_bytes(150, 1003, 4)
    backward = run(library.cross_entropy_backward, logits, labels, normaliser, scale=1 / 150, chunk=256)
    assert error(backward.output, logits.grad) < 1e-6
    assert backward.hbm_bytes == library.cross_entropy_backward_bytes(150, 1003, 4)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (BF16, 1.2e-2)])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(256, 640, False), (300, 300, True)])
def test_flash_attention_and_its_gradients(dtype, bound, queries, keys, causal) -> None:
    q, k, v = (torch.randn(2, n, 64).to(dtype) for n in (queries, keys, keys))
    leaves = [one.double().requires_grad_() for one in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    dout = torch.randn(2, queries, 64).to(dtype)
    wanted.backward(dout.double())
    forward = run(library.flash_attention, q, k, v, causal=causal)
    out, normaliser = forward.output
    assert error(out, wanted.detach()) < bound
    assert forward.hbm_bytes == library.flash_attention_bytes(2, queries, keys, 64, dtype.itemsize)
    backward = run(library.flash_attention_backward, q, k, v, out, normaliser, dout, causal=causal)
    for got, leaf in zip(backward.output, leaves, strict=True):
        assert error(got, leaf.grad) < bound
    assert backward.hbm_bytes == library.flash_attention_backward_bytes(2, queries, keys, 64, dtype.itemsize)


def test_causal_attention_skips_what_nobody_sees() -> None:
    q = torch.empty(1, 2048, 64, dtype=BF16, device="meta")
    full, causal = (
        run(library.flash_attention, q, q, q, dry=True, causal=causal) for causal in (False, True)
    )
    assert causal.flops < 0.7 * full.flops
    assert causal.seconds < full.seconds


def test_adamw_is_torchs() -> None:
    parameter, gradient = (torch.randn(150, 300) for _ in range(2))
    wanted = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([wanted], lr=0.01, weight_decay=0.1)
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step in (1, 2):
        wanted.grad = gradient * step
        optimizer.step()
        done = run(
            library.adamw, parameter, gradient * step, first, second, step=step, lr=0.01, weight_decay=0.1
        )
        parameter, first, second = done.output
    assert error(parameter, wanted.detach()) < 1e-6
    assert done.hbm_bytes == library.adamw_bytes(150 * 300)
