"""Predicted costs against counted ones: pairs, operations, bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.meter import flops
from fmlab.models.attention import AttentionMask, KVCache, WindowKVCache, flash_core, quadratic_core
from fmlab.models.attention.cost import (
    attention_flops,
    kv_cache_bytes,
    latent_cache_bytes,
    measure_memory,
    tiled_pairs,
    visible_pairs,
)

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12), st.integers(0, 9), st.booleans(), st.none() | st.integers(1, 25), st.integers(1, 5)
)
def test_pairs(queries: int, past: int, causal: bool, window: int | None, size: int) -> None:
    keys = queries + past
    mask = AttentionMask(causal, queries, keys, window=window)
    visible = int(mask.allowed(CPU).sum())
    assert visible_pairs(queries, keys, causal, window) == visible
    assert visible <= tiled_pairs(mask, size) <= queries * keys
    if causal and window is not None:
        assert visible <= queries * min(window, keys)
    assert attention_flops(queries, keys, 3, 5, "full", causal=causal, window=window) == 60 * queries * keys
    assert attention_flops(queries, keys, 3, 5, "visible", causal=causal, window=window) == 60 * visible


def test_operations_are_those_counted() -> None:
    mask = AttentionMask(True, 96, 96, window=20)
    q, k, v = (torch.randn(1, heads, 96, 8) for heads in (6, 2, 2))
    with flops() as quadratic:
        quadratic_core(q, k, v, mask)
    assert quadratic.total == attention_flops(96, 96, 6, 8, "full")  # 2 key/value heads save none
    with flops() as tiled:
        flash_core(q, k, v, mask, tile=8)
    assert tiled.total == 4 * 6 * 8 * tiled_pairs(mask, 8)
    visible = attention_flops(96, 96, 6, 8, "visible", window=20)
    assert visible < tiled.total < 0.4 * quadratic.total
    with pytest.raises(ValueError, match='"full" or "visible"'):
        attention_flops(1, 1, 1, 1, "causal")  # type: ignore[arg-type]


def test_cache_bytes() -> None:
    assert KVCache(3, 1, 2, 50, 8).nbytes == kv_cache_bytes(50, 3, 2, 8, itemsize=4)
    assert WindowKVCache(3, 1, 2, 10, 8).nbytes == kv_cache_bytes(50, 3, 2, 8, itemsize=4, window=10)
    # Llama-2 7B keeps 512 KiB a token in 16 bits, Llama-3.1 8B with 8 key/value heads a quarter of that.
    assert kv_cache_bytes(1, 32, 32, 128) == 512 * 1024
    assert kv_cache_bytes(1, 32, 8, 128) == 128 * 1024
    # DeepSeek-V2 in 60 layers: 576 numbers a token, 57 times fewer than its 128 heads of 128 would keep
    assert latent_cache_bytes(1, 60, 512, 64) == 69_120
    assert kv_cache_bytes(1, 60, 128, 128) // latent_cache_bytes(1, 60, 512, 64) == 56


def test_tiles_keep_memory_linear() -> None:
    """Twice the length: the quadratic core takes four times the memory, the tiled one twice."""
    memory = {
        (core, length): measure_memory(core, AttentionMask(True, length, length), heads=2, head_size=8)
        for core in (quadratic_core, flash_core)
        for length in (512, 1024)
    }
    short, long = memory[quadratic_core, 512], memory[quadratic_core, 1024]
    assert 3.8 < long.saved / short.saved < 4.1
    assert 3.8 < long.peak / short.peak < 4.1
    short, long = memory[flash_core, 512], memory[flash_core, 1024]
    assert 1.9 < long.saved / short.saved < 2.1
    assert long.peak / short.peak < 2.1
    assert long.saved == 2 * 1024 * (8 + 1) * 4  # the output and one log-sum-exp a row
    assert memory[quadratic_core, 1024].peak > 20 * long.peak
