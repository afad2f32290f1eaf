"""Every core against the float64 definition: any mask, grouped heads, scale, bias; forward and gradients."""

import shutil
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmlab.models.attention import (
    AttentionCore,
    AttentionMask,
    definition_core,
    flash_core,
    flex_core,
    sdpa_core,
)
from fmlab.models.attention.definition import quadratic_core
from fmlab.models.attention.flex import mask_function
from tests.models.attention.masks import masks

CPU = torch.device("cpu")
CORES = {
    "quadratic": quadratic_core,
    "sdpa": sdpa_core,
    "sdpa, finite mask": lambda *args, **named: sdpa_core(*args, **named, finite=True),
    "flash": flash_core,
    "flash, tiles of 3": lambda *args, **named: flash_core(*args, **named, tile=3),
}


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    upstream: Tensor


def inputs(
    mask: AttentionMask,
    groups: int = 2,
    shared: int = 2,
    bias_rows: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Random tensors that fit a mask; heads = groups * shared; `bias_rows` 0 for no bias."""
    generator = torch.Generator().manual_seed(mask.queries + 10 * mask.keys)
    batch, heads, width = len(mask.allowed(CPU)), groups * shared, 4
    batch = max(batch, 2) if batch == 1 and bias_rows < 2 else batch

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, upstream = random(batch, heads, mask.queries, width), random(batch, heads, mask.queries, width)
    key, value = random(batch, groups, mask.keys, width), random(batch, groups, mask.keys, width)
    bias = random(batch if bias_rows > 1 else 1, heads, mask.queries, mask.keys) if bias_rows else None
    return Inputs(query, key, value, bias, upstream)


def run(core: AttentionCore, given: Inputs, mask: AttentionMask, scale: float | None = None) -> list[Tensor]:
    """Output and the gradients of query, key, value and bias."""
    query, key, value, bias = (None if x is None else x.clone().requires_grad_() for x in given[:4])
    assert query is not None
    assert key is not None
    assert value is not None
    mixed = core(query, key, value, mask, scale=scale, bias=bias)
    wanted = [x for x in (query, key, value, bias) if x is not None]
    return [mixed, *torch.autograd.grad((mixed * given.upstream).sum(), wanted)]


@settings(max_examples=60, deadline=None)
@given(
    masks(),
    st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 1)]),
    st.sampled_from([None, 1.0]),
    st.integers(0, 2),
)
def test_cores_equal_the_definition(
    mask: AttentionMask, heads: tuple[int, int], scale: float | None, bias_rows: int
) -> None:
    given_ = inputs(mask, *heads, bias_rows=bias_rows)
    expected = run(definition_core, given_, mask, scale)
    blind = (
        mask.blind(CPU).expand(len(given_.query), *heads[:1], -1, -1).repeat_interleave(heads[1], 1)[..., 0]
    )
    for name, core in CORES.items():
        for ours, theirs in zip(run(core, given_, mask, scale), expected, strict=True):
            assert ours.isfinite().all(), name
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        assert not run(core, given_, mask, scale)[0][blind].any(), name
        assert not run(core, given_, mask, scale)[1][blind].any(), name


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_precision(core: str, dtype: torch.dtype, most: float) -> None:
    documents = (torch.arange(200) // 70).expand(2, -1)
    real = torch.arange(200) >= torch.tensor([[0], [81]])  # all of the second row's first document is padding
    mask = AttentionMask(True, 150, 200, real, documents[:, 50:], documents, window=60)
    given = inputs(mask, bias_rows=1, dtype=dtype)
    exact = run(definition_core, Inputs(*(x.double() for x in given if x is not None)), mask)
    for ours, theirs in zip(run(CORES[core], given, mask), exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= most * theirs.norm()


@pytest.mark.parametrize("core", CORES)
def test_padding_hides_keys_not_queries(core: str) -> None:
    real = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1]]).bool()
    mask = AttentionMask(False, 6, 6, real)
    given = inputs(mask)
    changed = real[:, None, :, None].logical_not()
    noisy = given._replace(key=given.key + 5 * changed, value=given.value - 7 * changed)
    before, after = run(CORES[core], given, mask), run(CORES[core], noisy, mask)
    assert torch.equal(before[0], after[0])  # not of the padded queries either: they see the real keys
    assert before[0].any(-1).all()
    assert not before[2][changed.expand_as(before[2])].any()  # and no gradient flows into a padded key


@pytest.mark.parametrize("core", CORES)
def test_a_single_query_sees_everything_before_it(core: str) -> None:
    whole, last = AttentionMask(True, 7, 7), AttentionMask(True, 1, 7)
    q, k, v, *_ = inputs(whole, dtype=torch.float32)
    with torch.no_grad():
        together, alone = CORES[core](q, k, v, whole), CORES[core](q[:, :, -1:], k, v, last)
    torch.testing.assert_close(alone, together[:, :, -1:])


@pytest.mark.parametrize("core", ["quadratic", "flash", "flash, tiles of 3"])
def test_dropout_of_probabilities(core: str) -> None:
    """Its gradients are those of the very factors that the forward pass drew, and its mean is the output."""
    mask = AttentionMask(True, 3, 4, window=3)
    given = inputs(mask, 1, 2, bias_rows=1)

    def dropped(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        query, key, value, bias = tensors
        mixed: Tensor = CORES[core](query, key, value, mask, 0.4, bias=bias)
        return mixed

    tensors = [x.clone().requires_grad_() for x in given[:4] if x is not None]
    assert torch.autograd.gradcheck(dropped, tensors, fast_mode=True)
    assert not torch.allclose(dropped(*tensors), CORES[core](*given[:3], mask, bias=given.bias))

    torch.manual_seed(0)
    wide = [x.repeat(600, 1, 1, 1) for x in given[:3]]
    mean = CORES[core](*wide, mask, 0.4, bias=given.bias).view(600, *given.query.shape).mean(0)
    exact = CORES[core](*given[:3], mask, bias=given.bias)
    assert (mean - exact).abs().mean() < 0.05 * exact.abs().mean() + 0.02


def test_flash_is_one_graph() -> None:
    real = torch.arange(6) >= torch.tensor([[2], [0]])
    query, key, value, *_ = inputs(AttentionMask(True, 6, 6, real), dtype=torch.float32)

    def attend(query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        return flash_core(query, key, value, AttentionMask(True, 6, 6, real))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    query.requires_grad_()
    results = [f(query, key, value, real) for f in (compiled, attend)]
    assert torch.equal(*results)
    assert torch.equal(*(torch.autograd.grad(x.square().sum(), query)[0] for x in results))


def test_flash_under_autocast_and_on_meta() -> None:
    mask = AttentionMask(True, 6, 6)
    given = inputs(mask, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = flash_core(*given[:3], mask)
    torch.testing.assert_close(mixed, definition_core(*given[:3], mask), rtol=1e-5, atol=1e-5)
    meta = [x.to("meta") for x in given[:3]]
    assert flash_core(*meta, mask).shape == given.query.shape
    with pytest.raises(ValueError, match="tile must be at least 1"):
        flash_core(*given[:3], mask, tile=0)


@settings(max_examples=40, deadline=None)
@given(masks())
def test_flex_gets_the_same_mask(mask: AttentionMask) -> None:
    rows = len(mask.allowed(CPU))
    b, h, q, s = (torch.arange(n) for n in (rows, 1, mask.queries, mask.keys))
    asked = mask_function(mask, CPU)(b[:, None, None], h[:, None, None], q[:, None], s)
    assert torch.equal(asked.expand(rows, -1, -1), mask.allowed(CPU)[:, 0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_flex_equals_the_definition() -> None:
    if " " in torch.__file__:
        pytest.skip("torch cannot compile from a folder with a space in its path")
    documents = (torch.arange(40) // 9).expand(2, -1)
    real = torch.arange(40) >= torch.tensor([[3], [40]])
    everything = AttentionMask(True, 25, 40, real, documents[:, 15:], documents, window=7)
    given = inputs(everything, bias_rows=1, dtype=torch.float32)
    with torch.no_grad():
        ours = flex_core(*given[:3], everything, bias=given.bias, scale=0.3)
        exact = definition_core(*given[:3], everything, bias=given.bias, scale=0.3)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_flex_says_what_it_cannot_do() -> None:
    mask = AttentionMask(True, 4, 4)
    q, k, v, *_ = inputs(mask, dtype=torch.float32)
    with pytest.raises(ValueError, match="no dropout"):
        flex_core(q, k, v, mask, 0.1)
    with pytest.raises(ValueError, match="no backward pass on a CPU"):
        flex_core(q.requires_grad_(), k, v, mask)
