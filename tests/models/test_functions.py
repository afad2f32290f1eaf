"""The autograd functions against the operators of torch that they stand for."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.models.functions import linear, look_up_and_lend, rms_norm
from tests.models.gpt_reference import shifted, small_gpt, tokens


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_16_bit_linear_errs_no_more_than_torch_does(
    rows: int, inputs: int, outputs: int, biased: bool
) -> None:
    torch.manual_seed(rows)
    x = torch.randn(2, rows, inputs, requires_grad=True)
    weight = torch.randn(outputs, inputs, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True) if biased else None
    wanted = [x, weight] + ([bias] if biased else [])
    upstream = torch.randn(2, rows, outputs)

    def run(product, *inputs):  # type: ignore[no-untyped-def]
        y = product(*inputs)
        return [
            y,
            *torch.autograd.grad((y * upstream.to(y.dtype)).sum(), [i for i in inputs if i is not None]),
        ]

    exact = run(
        F.linear, *(None if i is None else i.detach().double().requires_grad_() for i in (x, weight, bias))
    )
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = run(linear, x, weight, bias), run(F.linear, x, weight, bias)
    assert (
        [t.dtype for t in ours]
        == [t.dtype for t in theirs]
        == [torch.bfloat16] + [torch.float32] * len(wanted)
    )
    for mine, reference, truth in zip(ours, theirs, exact, strict=True):
        assert mine.shape == truth.shape
        assert (mine - truth).norm() <= 1.5 * (reference - truth).norm() + 2e-3 * truth.norm()


def test_linear_gives_only_the_wanted_gradients_and_nothing_without_grad_mode() -> None:
    x, weight = torch.randn(6, 8).bfloat16(), torch.randn(4, 8).bfloat16().requires_grad_()
    linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(4, 8))
    assert x.grad is None
    with torch.no_grad():
        assert not linear(x, weight).requires_grad


def test_narrow_products_are_whole() -> None:
    x, weight = torch.randn(101, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("uses", ["both", "rows only", "table only"])
def test_lent_table_has_the_gradients_of_its_uses(uses: str, padding: int | None) -> None:
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 2, 2], [7, 1, 1]])
    factor = torch.randn(11, 3, dtype=torch.float64)

    def total(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        from_rows = rows.pow(3).sum() if uses != "table only" else rows.new_zeros(())
        return from_rows + ((table.square() * factor).sum() if uses != "rows only" else 0)

    (got,) = torch.autograd.grad(total(*look_up_and_lend(weight, ids, padding)), weight)
    (want,) = torch.autograd.grad(total(F.embedding(ids, weight, padding), weight), weight)
    torch.testing.assert_close(got, want)


def test_a_tied_model_lends_its_table_unless_something_else_takes_its_place() -> None:
    ids = tokens(2, 9)

    def run(model):  # type: ignore[no-untyped-def]
        state = model(ids, labels=shifted(ids))
        fired = []
        model.embedding.tokens.weight.register_post_accumulate_grad_hook(
            lambda p: fired.append(p.grad.clone())
        )
        state.loss_sum.backward()
        assert len(fired) == 1
        return "one gradient for the tied table" in state.derived, fired[0]

    lent, gradient = run(small_gpt().double())
    assert lent
    hooked = small_gpt().double()
    hooked.embedding.tokens.register_forward_hook(lambda module, inputs, output: None)
    not_lent, same = run(hooked)
    assert not not_lent
    torch.testing.assert_close(gradient, same, rtol=1e-12, atol=1e-14)
    assert not run(small_gpt(tie_embeddings=False).double())[0]


def test_rms_norm_and_its_gradients_are_those_of_torch() -> None:
    x = torch.randn(3, 4, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, dtype=torch.float64, requires_grad=True)
    outputs = [rms_norm(x, weight, 1e-3), F.rms_norm(x, (9,), weight, 1e-3)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(out.pow(3).sum(), (x, weight)) for out in outputs))
