"""Cached attention equals uncached: every cache, mask and kind of position, fed in pieces of any size."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fmlab.models.attention import (
    AttentionCore,
    GrowingKVCache,
    KVCache,
    WindowKVCache,
    alibi_bias,
    alibi_slopes,
    causal_mask,
    flash_core,
    linear_core,
    quadratic_core,
    sdpa_core,
    sinusoidal_positions,
    t5_bias,
    token_positions,
)
from fmlab.models.attention.rotary import Rotary, rotate
from fmlab.models.layers import GroupedAttention
from fmlab.models.plan import check_plan
from fmlab.models.state import State
from tests.models.gpt_reference import shifted, small_gpt, tokens

LENGTH, WIDTH, HEADS, GROUPS, HEAD = 11, 12, 4, 2, 6
WINDOW = 4
CACHES: dict[str, Callable[[], KVCache]] = {
    "static": lambda: KVCache(1, 2, GROUPS, LENGTH, HEAD, torch.float64),
    "growing": lambda: GrowingKVCache(1, 2, GROUPS, HEAD, torch.float64, start=2),
    "window": lambda: WindowKVCache(1, 2, GROUPS, WINDOW, HEAD, torch.float64),
}
PIECES = [[1] * LENGTH, [LENGTH], [6, 1, 3, 1]]


def attend(
    layer: GroupedAttention,
    x: Tensor,
    real: Tensor | None,
    scheme: str,
    window: int | None = None,
    prefix: Tensor | None = None,
    cache: KVCache | None = None,
) -> Tensor:
    """One attention layer over the tokens x [b,l,d], after those in the cache."""
    new = x.shape[1]
    named = {"attention_mask": real, "prefix_lengths": prefix}
    state = State({n: t for n, t in named.items() if t is not None}, cache=cache)
    past = cache.begin(new, real) if cache is not None else None
    positions = token_positions(x[..., 0], real, None, past)
    mask = causal_mask(state, new, window=window)
    bias, turn = None, None
    if scheme == "sinusoidal":
        x = x + sinusoidal_positions(positions, WIDTH, dtype=x.dtype)
    elif scheme == "alibi":
        bias = alibi_bias(alibi_slopes(HEADS), new, mask.keys, x.dtype)
    elif scheme == "t5":
        table = torch.randn(8, HEADS, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
        bias = t5_bias(table, new, mask.keys, bidirectional=False, max_distance=10)
    elif scheme == "rotary":
        cos, sin = Rotary(HEAD)(positions)
        turn = lambda q, k: (rotate(q, cos, sin), rotate(k, cos, sin))  # noqa: E731
    mixed = layer(x, mask, cache, rotate=turn, bias=bias)
    if cache is not None:
        cache.finish(new)
    return mixed


def layer(core: AttentionCore) -> GroupedAttention:
    torch.manual_seed(0)
    made = GroupedAttention(WIDTH, HEAD, HEADS, core, kv_heads=GROUPS).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    return made.requires_grad_(False)


@pytest.mark.parametrize("scheme", ["none", "sinusoidal", "rotary", "alibi", "t5"])
@pytest.mark.parametrize("core", [sdpa_core, flash_core])
def test_cached_equals_uncached(scheme: str, core: AttentionCore) -> None:
    attention = layer(core)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    padding = torch.arange(LENGTH) >= torch.tensor([[3], [0]])
    for kind, pieces, real in itertools.product(CACHES, PIECES, [None, padding]):
        for window in [WINDOW] if kind == "window" else [None, WINDOW]:
            whole = attend(attention, x, real, scheme, window)
            cache, done = CACHES[kind](), 0
            for size in pieces:
                now = slice(done, done + size)
                part = None if real is None else real[:, now]
                mixed = attend(attention, x[:, now], part, scheme, window, cache=cache)
                # A padded query is compared too: it sees nothing, with and without a cache.
                torch.testing.assert_close(mixed, whole[:, now], rtol=1e-9, atol=1e-9)
                done += size


@pytest.mark.parametrize("kind", ["static", "growing"])
def test_a_prefix_comes_in_the_first_piece(kind: str) -> None:
    attention, x = layer(sdpa_core), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    real = torch.arange(LENGTH) >= torch.tensor([[2], [0]])
    prefix = torch.tensor([3, 4])
    whole = attend(attention, x, real, "rotary", prefix=prefix)
    cache = CACHES[kind]()
    parts = [attend(attention, x[:, :5], real[:, :5], "rotary", prefix=prefix, cache=cache)]
    parts += [attend(attention, x[:, i : i + 1], None, "rotary", cache=cache) for i in range(5, LENGTH)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    causal = attend(attention, x, real, "rotary")
    assert not torch.allclose(whole[:, :2], causal[:, :2])


def test_linear_attention_takes_a_cache_too() -> None:
    attention, x = layer(linear_core), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    whole, cache = attend(attention, x, None, "sinusoidal"), CACHES["static"]()
    parts = [attend(attention, x[:, i : i + 1], None, "sinusoidal", cache=cache) for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_window_cache_holds_a_window() -> None:
    assert CACHES["window"]().nbytes == 2 * 2 * GROUPS * (WINDOW - 1) * HEAD * 8
    cache = WindowKVCache(1, 1, 1, 1, 2)  # a window of 1: every token sees itself alone
    cache.begin(2, None)
    keys, _ = cache.extend(0, torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    cache.finish(2)
    assert keys.shape[2] == 2
    assert cache.keys(1) == 1
    with pytest.raises(ValueError, match="at least 1"):
        WindowKVCache(1, 1, 1, 0, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_query_attention_splits_by_width(kv_heads: int) -> None:
    """4 query heads of 16 and g key/value heads: a fused [d, (4 + 2 g) * 16] is cut 64, 16 g, 16 g, never in
    three equal parts. With equal weights for each group it is multi-head attention."""
    torch.manual_seed(0)
    grouped = GroupedAttention(8, 16, 4, sdpa_core, kv_heads=kv_heads, bias=False).double()
    full = GroupedAttention(8, 16, 4, sdpa_core, bias=False).double()
    for parameter in grouped.parameters():
        torch.nn.init.normal_(parameter)
    assert [grouped.query.weight.shape[0], *[grouped.key_value.weight.shape[0] // 2] * 2] == [
        64, 16 * kv_heads, 16 * kv_heads,
    ]  # fmt: skip
    full.query.weight, full.output.weight = grouped.query.weight, grouped.output.weight
    heads = grouped.key_value.weight.view(2, kv_heads, 16, 8).repeat_interleave(4 // kv_heads, 1)
    full.key_value.weight = torch.nn.Parameter(heads.reshape(128, 8))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = causal_mask(State(), 5)
    torch.testing.assert_close(grouped(x, mask), full(x, mask))


def test_gpt_takes_a_prefix() -> None:
    model, ids = small_gpt().double().eval(), tokens(2, 9)
    prefix = torch.tensor([4, 0])
    logits = model(ids, prefix_lengths=prefix).logits
    changed = ids.clone()
    changed[:, 3] = (ids[:, 3] + 1) % 101
    moved = (model(changed, prefix_lengths=prefix).logits != logits).any(-1)
    assert moved.tolist() == [
        [True] * 9,
        [False] * 3 + [True] * 6,
    ]  # only row 0 has a prefix
    assert torch.equal(model(ids).logits[1], logits[1])
    cache = model.new_cache(2)
    first = model(ids[:, :5], cache=cache, prefix_lengths=prefix).logits
    torch.testing.assert_close(torch.cat([first, model(ids[:, 5:], cache=cache).logits], 1), logits)
    with pytest.raises(ValueError, match=r"whole numbers \[2\]"):
        model(ids, prefix_lengths=prefix[:1])
    with pytest.raises(ValueError, match="one document in a row"):
        model(ids, prefix_lengths=prefix, document_ids=torch.zeros_like(ids))
    check_plan(model, {"input_ids": ids, "labels": shifted(ids), "prefix_lengths": prefix})


@pytest.mark.parametrize("core", [flash_core, quadratic_core, linear_core])
def test_gpt_takes_any_core(core: AttentionCore) -> None:
    model, ids = small_gpt(), tokens(2, 9)
    for layer in model.blocks[1:-1]:
        layer.get_submodule("attention").core = core
    real = torch.arange(9) >= torch.tensor([[2], [0]])
    loss = model(ids, labels=shifted(ids), attention_mask=real).loss_sum
    grads = torch.autograd.grad(loss, list(model.parameters()))
    if core is not linear_core:
        twin = small_gpt()
        same = twin(ids, labels=shifted(ids), attention_mask=real).loss_sum
        torch.testing.assert_close(loss, same)
        for ours, theirs in zip(grads, torch.autograd.grad(same, list(twin.parameters())), strict=True):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
