"""Each kernel equals its definition in float64, outputs and gradients, on sizes that fill no tile."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton, the extra `kernels`, is for Linux only")
from fmlab.kernels import triton as ft

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of the largest rounding, relative


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The result and the gradient of each input, for an output gradient that differs everywhere."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    d_out = randn(*out.shape, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def assert_same(ours: list[Tensor], exact: list[Tensor], within: float) -> None:
    for mine, right in zip(ours, exact, strict=True):
        assert mine.shape == right.shape
        assert (mine.double() - right).norm() <= within * right.norm() + 1e-12


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


CASES = {
    "matmul": (ft.matmul, torch.matmul, [(67, 45), (45, 81)]),
    "matmul, a row": (ft.matmul, torch.matmul, [(1, 45), (45, 1)]),
    "softmax": (ft.softmax, lambda x: x.softmax(-1), [(3, 5, 77)]),
    "layer norm": (ft.layer_norm, norm, [(3, 23, 77), (77,), (77,)]),
    "layer norm, many rows": (ft.layer_norm, norm, [(130, 5), (5,), (5,)]),
    "rms norm": (ft.rms_norm, rms, [(3, 23, 77), (77,)]),
    "bias gelu": (ft.bias_gelu, lambda x, b: F.gelu(x + b), [(2, 9, 77), (77,)]),
    "bias gelu, tanh": (lambda x, b: ft.bias_gelu(x, b, "tanh"), gelu, [(70, 33), (33,)]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_definition(name: str) -> None:
    ours, definition, shapes = CASES[name]
    inputs = [randn(*shape, seed=n) for n, shape in enumerate(shapes)]
    assert_same(outcome(ours, inputs), outcome(definition, [x.double() for x in inputs]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["matmul", "softmax", "layer norm", "rms norm", "bias gelu"])
def test_16_bits_are_computed_in_fp32_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    ours, definition, shapes = CASES[name]
    inputs = [randn(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
    exact = definition(*[x.double() for x in inputs])
    out = ours(*inputs)
    assert out.dtype == dtype
    # an fp32 result just beside a tie may round the other way: hence the little more
    slack = 1.01 * HALF_ULP[dtype] * exact.abs() + 2e-6
    assert ((out.double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_a_vocabulary_of_several_tiles(dtype: torch.dtype) -> None:
    logits = (4 * randn(7, 2500)).to(dtype)
    logits[2, 5] = 90  # exp(90) is no fp32 number: only differences to the largest may be taken
    targets = torch.tensor([0, 2499, 5, 1024, -100, 1023, 17])

    def fused(x: Tensor) -> Tensor:
        return ft.cross_entropy(x, targets)

    def definition(x: Tensor) -> Tensor:
        return F.cross_entropy(x, targets, reduction="none")

    ours, exact = outcome(fused, [logits]), outcome(definition, [logits.double()])
    assert ours[0].dtype == torch.float32
    assert ours[0][4] == 0
    assert_same(ours, exact, 1e-6 if dtype == torch.float32 else 3e-3)
    assert_same(ours[:1], exact[:1], 1e-6)  # the loss is fp32, whatever the logits


def test_the_loss_of_a_bf16_model_is_not_in_steps() -> None:
    """Computed in bf16 a loss near 36 would be a multiple of 0.25."""
    logits = torch.zeros(4, 64, dtype=torch.bfloat16)
    logits[:, 0] = torch.tensor([36.0, 36.25, 36.5, 36.75])
    logits[:, 1] = torch.tensor([30.0, 30.125, 30.25, 30.375])
    losses = ft.cross_entropy(logits, torch.full((4,), 3))
    exact = F.cross_entropy(logits.double(), torch.full((4,), 3), reduction="none")
    torch.testing.assert_close(losses.double(), exact, atol=1e-5, rtol=0)
    assert ((4 * losses) % 1 != 0).all()


def test_adamw_follows_torch_for_several_steps() -> None:
    start = randn(5, 333)
    right = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([right], lr=0.02, betas=(0.8, 0.999), eps=1e-6, weight_decay=0.1)
    weight, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 5):
        grad = randn(5, 333, seed=step)
        right.grad = grad.double()
        optimizer.step()
        ft.adamw_step(
            weight, grad, mean, square, step, lr=0.02, betas=(0.8, 0.999), eps=1e-6, weight_decay=0.1
        )
    state = optimizer.state[right]
    for ours, exact in ((weight, right), (mean, state["exp_avg"]), (square, state["exp_avg_sq"])):
        torch.testing.assert_close(ours.double(), exact.detach(), atol=1e-7, rtol=1e-5)


def test_nothing_is_something_too() -> None:
    assert ft.matmul(randn(0, 4), randn(4, 3)).shape == (0, 3)
    assert torch.equal(ft.matmul(randn(2, 0), randn(0, 3)), torch.zeros(2, 3))
    assert ft.softmax(randn(0, 4)).shape == (0, 4)
    x, weight = randn(0, 4).requires_grad_(), randn(4).requires_grad_()
    ft.rms_norm(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(4))
