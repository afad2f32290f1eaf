"""Rewrites before differentiation: counted, equal in values and gradients, and refused where they must be."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.compiler import AttentionToSDPA, MergeProducts, Norms, Pass, Report, compile

Q, D = 5, 8


def applied(fn: Callable[..., Any], one: Pass, *inputs: Tensor) -> Report:
    """The report, after values and gradients were compared with eager's in fp64."""
    inputs = tuple(x.double().requires_grad_() if x.is_floating_point() else x for x in inputs)
    leaves = [x for x in inputs if x.requires_grad]
    compiled = compile(fn, *inputs, passes=[one])
    want, got = fn(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected = torch.autograd.grad((want * weights).sum(), leaves)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), leaves), expected, rtol=1e-10, atol=1e-11
    )
    assert not compiled.program.notes
    return compiled.program.reports[0][1]


def heads(seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, Q, D, generator=generator) for _ in range(3))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(Q, Q, dtype=torch.bool).triu(1)
    return (q @ k.transpose(-2, -1) * 0.3).masked_fill(hidden, -math.inf).softmax(-1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(Q, Q, dtype=torch.bool).triu(2)
    return F.dropout((q @ k.transpose(-2, -1)).masked_fill(hidden, -math.inf).softmax(-1), 0.1, False) @ v


def test_attention_becomes_one_operator_with_its_mask_and_scale() -> None:
    for fn, made in ((attend, "attention"), (causal, "causal attention"), (windowed, "attention")):
        report = applied(fn, AttentionToSDPA(), *heads())
        assert dict(report.made) == {made: 1}, fn
        assert report.after["scaled_dot_product_attention"] == 1
        assert not {"matmul", "softmax", "masked_fill"} & set(report.after)
    assert report.bytes_after < report.bytes_before


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) + mask).softmax(-1) @ v


def test_a_mask_that_is_an_input_needs_the_callers_word() -> None:
    mask = torch.zeros(2, 1, Q, Q)
    mask[0, :, :, 3:] = -1e4
    report = applied(masked, AttentionToSDPA(), *heads(), mask)
    assert not report.changed
    assert "a row might see nothing" in report.refused[0]
    assert applied(masked, AttentionToSDPA(every_row_sees=True), *heads(), mask).made["attention"] == 1


def probabilities_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probs = (q @ k.transpose(-2, -1)).softmax(-1)
    return probs @ v + probs.sum()


def blind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.arange(Q)[:, None] < 1  # the first query sees nothing
    return (q @ k.transpose(-2, -1)).masked_fill(hidden, -1e30).softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(2) @ v


REFUSED = {probabilities_too: "second reader", blind: "sees nothing", over_queries: "not over the keys"}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_attention_that_is_something_else_is_left_alone(fn: Callable[..., Tensor]) -> None:
    report = applied(fn, AttentionToSDPA(), *heads())
    assert not report.made
    assert REFUSED[fn] in report.refused[0]


def test_attention_with_dropout_is_left_alone() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.5, True) @ v

    q, k, v = (x.requires_grad_() for x in heads())
    compiled = compile(fn, q, k, v, passes=[AttentionToSDPA()])
    assert "dropout" in compiled.program.reports[0][1].refused[0]
    torch.manual_seed(0)
    want = fn(q, k, v)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(q, k, v), want)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return w * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)) + b


def divided(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-3).sqrt() * w + b


def rms_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w).sin() + b


def variance_too(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + 1e-5) * w + b * variance


def other_dim(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-2, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-2, keepdim=True) + 1e-5) * w + b


@pytest.mark.parametrize(
    ("fn", "made"),
    [
        (layer_norm, "layer_norm"),
        (divided, "layer_norm"),
        (rms_norm, "rms_norm"),
        (variance_too, ""),
        (other_dim, ""),
    ],
)
def test_norms_become_one_operator_unless_part_of_them_is_read_elsewhere(
    fn: Callable[..., Tensor], made: str
) -> None:
    report = applied(fn, Norms(), torch.randn(3, 4, D), torch.randn(D), torch.randn(D))
    assert dict(report.made) == ({made: 1} if made else {})
    if made:
        assert report.after[made] == 1
        assert not {"mean", "rsqrt", "sqrt"} & set(report.after)
    elif fn is variance_too:
        assert "second reader" in report.refused[0]


class QKV(nn.Module):
    """Three products of one input; the third may read something else."""

    def __init__(self, apart: bool = False, bias: bool = True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, width, bias=bias) for width in (8, 4, 4))
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        other = x.sin() if self.apart else x
        parts = self.q(x), self.k(x), self.v(other)
        return torch.cat([part.view(2, 3, 2, -1) for part in parts], -1)


@pytest.mark.parametrize("bias", [True, False])
def test_three_products_of_one_input_become_one_and_stay_live(bias: bool) -> None:
    torch.manual_seed(0)
    model = QKV(bias=bias).double()
    report = applied(model, MergeProducts(), torch.randn(2, 3, D))
    assert dict(report.made) == {"merged": 1}
    assert (report.before["linear"], report.after["linear"]) == (3, 1)
    x = torch.randn(2, 3, D).double()
    compiled = compile(model, x, passes=[MergeProducts()])
    with torch.no_grad():
        model.k.weight.mul_(2.0)
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, {name: p.grad for name, p in model.named_parameters()})


def test_products_of_other_inputs_or_of_few_rows_are_left_alone() -> None:
    x = torch.randn(2, 3, D)
    assert "fewer than 3" in applied(QKV(apart=True).double(), MergeProducts(), x).refused[0]
    assert "too few to pay" in applied(QKV().double(), MergeProducts(rows_per_column=1), x).refused[0]


def test_a_function_that_writes_in_place_is_not_rewritten() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        moved = k + 0
        before = moved.sum(-1, keepdim=True)
        moved.add_(1)
        return attend(q, k, v) + before + moved

    q, k, v = (x.requires_grad_() for x in heads())
    compiled = compile(fn, q, k, v, passes=[AttentionToSDPA()])
    assert "writes in place" in compiled.program.notes[0]
    torch.testing.assert_close(compiled(q, k, v), fn(q, k, v))
