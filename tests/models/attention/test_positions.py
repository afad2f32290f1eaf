"""T5's buckets, ALiBi and sinusoidal positions against their definitions and against transformers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.models.attention.alibi import alibi_bias, alibi_slopes
from fmlab.models.attention.sinusoidal import sinusoidal_positions
from fmlab.models.attention.t5_buckets import relative_buckets, relative_position_bucket, t5_bias


def bucket(distance: int, bidirectional: bool, buckets: int, most: int) -> int:
    """The definition, one pair at a time, in float64."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        far = abs(distance)
    else:
        far = max(-distance, 0)
    exact = buckets // 2
    if far < exact:
        return first + far
    share = math.log(far / exact) / math.log(most / exact)
    return first + min(exact + int(share * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (4, 512)])
def test_buckets(bidirectional: bool, buckets: int, most: int) -> None:
    distance = torch.arange(-700, 701)
    ours = relative_position_bucket(distance, bidirectional, buckets, most)
    assert ours.tolist() == [bucket(int(d), bidirectional, buckets, most) for d in distance]
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    assert torch.equal(ours, t5.T5Attention._relative_position_bucket(distance, bidirectional, buckets, most))


def test_buckets_of_a_cache_are_the_last_rows() -> None:
    whole = relative_buckets(9, 9, bidirectional=False)
    assert torch.equal(relative_buckets(2, 9, bidirectional=False), whole[-2:])
    assert whole[0, 5] == 0
    assert whole[5, 0] == 5
    table = torch.randn(32, 3, requires_grad=True)
    bias = t5_bias(table, 2, 9, bidirectional=False)
    assert bias.shape == (1, 3, 2, 9)
    assert bias[0, 1, 0, 3] == table[4, 1]
    bias.sum().backward()
    assert table.grad is not None
    assert table.grad.sum() == 3 * 2 * 9


@pytest.mark.parametrize(
    ("two_sided", "buckets", "most"), [(True, 5, 9), (True, 2, 9), (False, 1, 9), (False, 32, 16)]
)
def test_impossible_buckets_are_refused(two_sided: bool, buckets: int, most: int) -> None:
    with pytest.raises(ValueError, match="buckets"):
        relative_position_bucket(torch.arange(3), two_sided, buckets, most)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20, 40, 112])
def test_alibi_slopes(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,)
    if heads == 8:
        assert slopes.tolist() == [2.0**-i for i in range(1, 9)]
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    real = torch.ones(1, 5)
    theirs = bloom.build_alibi_tensor(real, heads, torch.float32)[:, 0, :]  # slope * position of the key
    ours = alibi_bias(slopes, 1, 5)[0, :, 0, :]
    torch.testing.assert_close(ours + 4 * slopes[:, None], theirs, rtol=1e-5, atol=1e-6)


def test_alibi_counts_distances_from_the_end() -> None:
    slopes = alibi_slopes(4)
    whole = alibi_bias(slopes, 6, 6)
    assert torch.equal(alibi_bias(slopes, 2, 6), whole[:, :, -2:])
    assert whole[0, 1, 5, 2] == -3 * slopes[1] == whole[0, 1, 2, 5]
    with pytest.raises(ValueError, match="at least 1"):
        alibi_slopes(0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 8), st.booleans())
def test_a_shift_rotates_sinusoidal_positions(start: int, shift: int, pairs: int, interleaved: bool) -> None:
    width = 2 * pairs
    first, second = sinusoidal_positions(
        torch.tensor([start, start + shift]), width, interleaved=interleaved, dtype=torch.float64
    )
    if not interleaved:
        first, second = (v.view(2, pairs).T.flatten() for v in (first, second))
    for i in range(pairs):
        rate = 10000.0 ** (-2 * i / width)
        assert math.isclose(first[2 * i], math.sin(start * rate), abs_tol=1e-9)
        turned = first[2 * i] * math.cos(shift * rate) + first[2 * i + 1] * math.sin(shift * rate)
        assert math.isclose(second[2 * i], turned, abs_tol=1e-9)


def test_sinusoidal_positions_of_a_batch() -> None:
    ids = torch.tensor([[0, 1, 2], [7, 8, 100_000]])
    vectors = sinusoidal_positions(ids, 6)
    assert vectors.shape == (2, 3, 6)
    assert vectors.dtype == torch.float32
    assert vectors[0, 0].tolist() == [0, 1, 0, 1, 0, 1]
    assert abs(float(vectors[1, 2, 0]) - math.sin(100_000)) < 1e-6
    with pytest.raises(ValueError, match="even"):
        sinusoidal_positions(ids, 5)
