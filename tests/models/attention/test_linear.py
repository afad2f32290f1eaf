"""Linear attention: running sums and recurrence against the weights of all pairs."""

import pytest
import torch
from torch import Tensor

from fmlab.models.attention import AttentionMask, LinearState, linear_core, linear_definition
from fmlab.models.attention.linear import feature_map


def inputs(queries: int, keys: int, groups: int, shared: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries)
    heads = groups * shared
    shapes = [(2, heads, queries, 3), (2, groups, keys, 3), (2, groups, keys, 5)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    ("causal", "queries", "keys"), [(True, 9, 9), (True, 4, 9), (False, 9, 9), (False, 3, 7)]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_running_sums_equal_all_pairs(
    causal: bool, queries: int, keys: int, padded: bool, chunk: int
) -> None:
    real = torch.arange(keys) >= torch.tensor([[2], [0]]) if padded else None
    mask = AttentionMask(causal, queries, keys, real)
    tensors = inputs(queries, keys, groups=2)
    ours, theirs = linear_core(*tensors, mask, chunk=chunk), linear_definition(*tensors, mask)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    grads = [torch.autograd.grad(y, tensors, upstream) for y in (ours, theirs)]
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine, exact)
    if padded and causal and queries == keys:
        assert not ours[0, :, :2].any()  # they see padding only


def test_a_step_at_a_time_in_a_state_that_does_not_grow() -> None:
    query, key, value = inputs(9, 9, groups=1)
    whole = linear_core(query, key, value, AttentionMask(True, 9, 9))
    state = LinearState.empty(key, value)
    size = state.nbytes
    for t in range(9):
        one = slice(t, t + 1)
        mixed, state = state.step(query[:, :, one], key[:, :, one], value[:, :, one])
        torch.testing.assert_close(mixed, whole[:, :, one])
    assert state.nbytes == size == 2 * 3 * (5 + 1) * 8
    # a state of many keys goes on where they ended
    begun = LinearState.empty(key, value).with_keys(feature_map(key[:, :, :8]), value[:, :, :8])
    torch.testing.assert_close(
        begun.step(query[:, :, 8:], key[:, :, 8:], value[:, :, 8:])[0], whole[:, :, 8:]
    )


def test_definition_is_the_papers() -> None:
    """One query, two keys, by hand: weights phi(q).phi(k) with phi(x) = x + 1 for x > 0, exp(x) below."""
    query, key = torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    value = torch.tensor([[1.0], [4.0]])
    weights = [2 * 1 + 1 * 2, 2 * 3 + 1 * 1]
    mixed = linear_definition(
        query.view(1, 1, 1, 2), key.view(1, 1, 2, 2), value.view(1, 1, 2, 1), AttentionMask(True, 1, 2)
    )
    assert mixed.item() == pytest.approx((weights[0] * 1 + weights[1] * 4) / sum(weights))
    assert feature_map(torch.tensor(-1.0)).item() == pytest.approx(0.36787944)


def test_what_it_cannot_do_is_refused() -> None:
    tensors = inputs(4, 4, groups=1)
    plain = AttentionMask(True, 4, 4)
    with pytest.raises(ValueError, match="cannot do: dropout, scale"):
        linear_core(*tensors, plain, 0.1, scale=1.0)
    with pytest.raises(ValueError, match="cannot do: window"):
        linear_core(*tensors, AttentionMask(True, 4, 4, window=2))
    with pytest.raises(ValueError, match="chunk must be"):
        linear_core(*tensors, plain, chunk=0)
