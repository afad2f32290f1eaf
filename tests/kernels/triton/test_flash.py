"""Flash attention, forward and backward, equals its definition in float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, the extra `kernels`, is for Linux only")
from fmlab.kernels import triton as ft


def heads(b: int, h: int, n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(b, h, n, d, generator=torch.Generator().manual_seed(seed))


def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -float("inf"))
    return scores.softmax(-1) @ v


SHAPES = {  # b, h, g, n, s, d, causal, tile
    "one tile, partly filled": (1, 1, 1, 5, 7, 3, False, None),
    "uneven in all": (2, 2, 2, 37, 53, 20, False, (16, 32)),
    "causal, wide tiles of queries": (1, 2, 2, 75, 75, 16, True, (32, 16)),
    "causal, wide tiles of keys": (1, 2, 2, 75, 75, 16, True, (16, 64)),
    "shared keys": (2, 4, 2, 33, 33, 24, True, (16, 32)),
    "one key head for all": (1, 3, 1, 17, 40, 16, False, (16, 16)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_equals_its_definition(name: str) -> None:
    b, h, g, n, s, d, causal, tile = SHAPES[name]
    shapes = ((b, h, n, d), (b, g, s, d), (b, g, s, d))
    inputs = [heads(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    d_out = heads(b, h, n, d, seed=7)
    ours = ft.attention(*inputs, causal=causal, tile=tile)
    right = definition(*exact, causal)
    pairs = [(ours, right)]
    found = torch.autograd.grad(ours, inputs, d_out)
    pairs += zip(found, torch.autograd.grad(right, exact, d_out.double()), strict=True)
    for mine, true in pairs:
        assert (mine.double() - true).norm() <= 1e-6 * true.norm()


def test_large_scores_do_not_overflow_and_the_scale_is_the_callers() -> None:
    q, k, v = (heads(1, 1, 40, 16, seed=i) for i in range(3))
    q = 60 * q  # scores of some hundreds: exp of them is no fp32 number
    out = ft.attention(q, k, v, scale=0.7, tile=(16, 16))
    exact = definition(q.double(), k.double(), v.double(), False, scale=0.7)
    assert (out.double() - exact).norm() <= 1e-5 * exact.norm()


def test_bf16_is_as_near_as_torch_s_own() -> None:
    q, k, v = (heads(1, 2, 70, 32, seed=i).bfloat16() for i in range(3))
    exact = definition(q.double(), k.double(), v.double(), True)
    ours = ft.attention(q, k, v, causal=True, tile=(32, 32))
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    off, their_off = ((x.double() - exact).norm() for x in (ours, torchs))
    assert ours.dtype == torch.bfloat16
    assert off <= 1.2 * their_off


def test_nothing_behind_a_query_reaches_it() -> None:
    q, k, v = (heads(1, 1, 50, 16, seed=i) for i in range(3))
    before = ft.attention(q, k, v, causal=True, tile=(16, 32))
    k[:, :, 31:], v[:, :, 31:] = 1e30, float("nan")
    after = ft.attention(q, k, v, causal=True, tile=(16, 16))
    assert torch.equal(before[:, :, :16], after[:, :, :16])


@pytest.mark.parametrize(
    ("shapes", "causal", "says"),
    [
        (((1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), False, "3 query heads cannot share 2"),
        (((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)), True, "4 queries, 5 keys"),
        (((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 6, 8)), False, "the shape of key"),
        (((1, 2, 4, 8), (1, 2, 4, 9), (1, 2, 4, 9)), False, "d of the query"),
        (((1, 2, 4, 300), (1, 2, 4, 300), (1, 2, 4, 300)), False, "up to 256"),
        (((1, 2, 4, 8), (1, 2, 0, 8), (1, 2, 0, 8)), False, "no keys"),
        (((2, 4, 8), (2, 4, 8), (2, 4, 8)), False, r"give \[b, h, n, d\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple, causal: bool, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ft.attention(*(torch.zeros(shape) for shape in shapes), causal=causal)
