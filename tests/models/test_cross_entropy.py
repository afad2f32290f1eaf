"""The chunked cross-entropy against torch's on full logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.models import cross_entropy
from fmlab.models.cross_entropy import linear_cross_entropy


def case(
    n: int, d: int, v: int, ignored: float = 0.3, scale: float = 1.0, dtype: torch.dtype = torch.float64
):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(n * 1000 + v)
    hidden = (torch.randn(n, d, generator=g, dtype=dtype) * scale).requires_grad_()
    weight = torch.randn(v, d, generator=g, dtype=dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), generator=g)
    labels[torch.rand(n, generator=g) < ignored] = -100
    return hidden, weight, labels


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 60), st.integers(1, 4000), st.floats(-3, 3))
def test_equals_full_logits_for_any_shape_chunk_and_upstream_gradient(
    n: int, d: int, v: int, chunk: int, upstream: float
) -> None:
    hidden, weight, labels = case(n, d, v)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_BYTES", chunk)
        loss = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(loss * upstream, (hidden, weight))
    want = torch.autograd.grad(expected * upstream, (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_all_ignored_gives_zero_loss_and_zero_gradients() -> None:
    hidden, weight, labels = case(9, 4, 13, ignored=2.0)
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.item() == 0
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_bias_counts_in_the_loss_and_gets_its_gradient(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, labels = case(30, 6, 50)
    bias = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = F.cross_entropy(hidden @ weight.T + bias, labels, reduction="sum")
    want = torch.autograd.grad(3 * expected, (hidden, weight, bias))
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 7 * 50 * 8)  # several chunks
    inputs = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    loss = linear_cross_entropy(inputs[0], inputs[1], labels, inputs[2])
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    for got, wanted in zip(torch.autograd.grad(3 * loss, inputs), want, strict=True):
        assert (got.double() - wanted).norm() <= tolerance * wanted.norm()


def test_extreme_logits_stay_finite_and_exact() -> None:
    hidden, weight, labels = case(20, 8, 50, scale=300.0, dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels)
    expected = F.cross_entropy(hidden.double() @ weight.double().T, labels, reduction="sum")
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_wanted_gradient_is_made(frozen: str) -> None:
    hidden, weight, labels = case(9, 4, 13)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    wanted = weight if frozen == "hidden" else hidden
    (got,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), wanted)
    (want,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), wanted)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_no_gradient_is_made_without_grad_mode_and_a_second_backward_is_refused() -> None:
    hidden, weight, labels = case(9, 4, 13)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        loss.backward()


def test_weight_used_twice_collects_both_gradients_and_its_hooks_fire_once() -> None:
    hidden, weight, labels = case(9, 4, 13)
    calls = []
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    (linear_cross_entropy(hidden, weight, labels) + weight.square().sum()).backward()
    (want,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), weight)
    assert len(calls) == 1
    torch.testing.assert_close(calls[0], want + 2 * weight.detach(), rtol=1e-10, atol=1e-12)


def test_bf16_autocast_keeps_softmax_and_loss_in_fp32() -> None:
    hidden, weight, labels = case(64, 32, 500, dtype=torch.float32)
    exact = linear_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32
    logits = hidden.detach().bfloat16() @ weight.detach().bfloat16().T
    expected = F.cross_entropy(logits.float(), labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert 0 < abs(loss / exact - 1) < 1e-2


@pytest.mark.parametrize("bad", [torch.tensor([1, 99]), torch.tensor([-5, 2])])
def test_labels_outside_the_vocabulary_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"outside the vocabulary of 10: legal 0\.\.9"):
        linear_cross_entropy(torch.randn(2, 4), torch.randn(10, 4), bad)


def test_labels_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels \[3\]"):
        linear_cross_entropy(torch.randn(2, 4), torch.randn(10, 4), torch.zeros(3, dtype=torch.long))
