"""Attention with a learned bias: numbers and every gradient against the definition; 16 bits no worse."""

import pytest
import torch
from torch import Tensor

from fmlab.models.attention import AttentionMask, sdpa_core
from fmlab.models.attention.biased import biased_attention


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2, 5, 4), (3, 2, 7, 4), (3, 2, 7, 6), (1, 2, 5, 7)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    # As the layers have them: heads are a dim of the matrices' output, not of the memory.
    made[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made[:3]]
    return [x.to(dtype).requires_grad_() for x in made]


def definition(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: AttentionMask, scale: float
) -> Tensor:
    hidden = ~mask.allowed(query.device)
    scores = (scale * query @ key.mT + bias).masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1).masked_fill(hidden, 0.0) @ value


REAL = torch.ones(3, 7, dtype=torch.bool)
REAL[1, :3] = False
BLIND = REAL.clone()
BLIND[2] = False  # a row whose queries may see nothing
MASKS = {
    "none": AttentionMask(False, 5, 7),
    "padded": AttentionMask(False, 5, 7, REAL),
    "causal": AttentionMask(True, 5, 7),
    "blind": AttentionMask(False, 5, 7, BLIND),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_values_and_gradients_are_those_of_the_definition(mask: str, scale: float) -> None:
    tensors = inputs()
    mixed = sdpa_core(*tensors[:3], MASKS[mask], scale=scale, bias=tensors[3])
    assert "BiasedAttention" in type(mixed.grad_fn).__name__
    expected = definition(*tensors, MASKS[mask], scale)
    torch.testing.assert_close(mixed, expected.nan_to_num(0.0), rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(mixed)
    got = torch.autograd.grad((mixed * weight).sum(), tensors)
    want = torch.autograd.grad((expected.nan_to_num(0.0) * weight).sum(), tensors)
    want = [torch.nan_to_num(grad, 0.0) for grad in want]
    if mask == "blind":  # the softmax of nothing makes NaN of the definition's gradients in that row only
        got, want = ([grads[0][:2], grads[1][:2], grads[2][:2]] for grads in (got, want))
    torch.testing.assert_close(list(got), list(want), rtol=1e-11, atol=1e-12)


def test_it_is_used_where_the_bias_is_trained_only() -> None:
    query, key, value, bias = inputs(torch.float32)
    mask = MASKS["none"]
    fixed = sdpa_core(query, key, value, mask, bias=bias.detach())
    assert "BiasedAttention" not in type(fixed.grad_fn).__name__
    torch.testing.assert_close(fixed, biased_attention(query, key, value, bias), rtol=1e-5, atol=1e-6)


def test_sixteen_bits_keep_the_scores_in_float32() -> None:
    exact, rough = inputs(), inputs(torch.bfloat16)
    for wide, narrow in zip(exact, rough, strict=True):
        wide.data.copy_(narrow.data)
    results = [biased_attention(*tensors) for tensors in (exact, rough)]
    grads = [torch.autograd.grad(r.square().sum(), t) for r, t in zip(results, (exact, rough), strict=True)]
    for want, got in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).norm() < 0.012 * want.norm()  # bfloat16 has 8 bits: half a unit is 0.2 %
