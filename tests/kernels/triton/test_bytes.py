"""Predicted bytes are the counted ones: of tiled products and of flash attention, there and back."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton, the extra `kernels`, is for Linux only")
from fmlab.kernels import triton as ft


@pytest.mark.parametrize("tile", [(16, 16, 16), (32, 16, 64), (64, 64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiled_product(tile: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = 50, 70, 33
    with ft.count_bytes() as count:
        ft.matmul(torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype), ft.Tile(*tile))
    (launch,) = count.launches
    assert (count.loaded, count.stored) == ft.matmul_bytes(m, n, k, *tile[:2], itemsize=dtype.itemsize)
    columns_of_tiles, rows_of_tiles = -(-n // tile[1]), -(-m // tile[0])
    assert launch.programs == columns_of_tiles * rows_of_tiles
    assert launch.loaded["a"] == m * k * columns_of_tiles * dtype.itemsize
    assert launch.loaded["b"] == k * n * rows_of_tiles * dtype.itemsize
    assert launch.stored == {"c": m * n * dtype.itemsize}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [(32, 16), (16, 64)])
def test_flash_attention(causal: bool, tile: tuple[int, int]) -> None:
    b, h, g, n, d = 1, 2, 1, 50, 20
    s = n if causal else 37
    q = torch.ones(b, h, n, d, requires_grad=True)
    k, v = (torch.ones(b, g, s, d, requires_grad=True) for _ in range(2))
    with ft.count_bytes() as forward:
        out = ft.attention(q, k, v, causal=causal, tile=tile)
    assert (forward.loaded, forward.stored) == ft.attention_bytes(n, s, d, *tile, heads=b * h, causal=causal)
    with ft.count_bytes() as backward:
        out.sum().backward()
    predicted = ft.attention_backward_bytes(n, s, d, *tile, heads=b * h, kv_heads=b * g, causal=causal)
    assert (backward.loaded, backward.stored) == predicted


def test_theorem_2_bytes_fall_with_the_tile_of_queries_and_not_with_that_of_keys() -> None:
    n, d = 4096, 64
    keys_and_values = [ft.attention_bytes(n, n, d, tile, 64).loaded - n * d * 4 for tile in (32, 64, 128)]
    assert keys_and_values == [2 * n * n * d * 4 // tile for tile in (32, 64, 128)]
    assert ft.attention_bytes(n, n, d, 64, 16) == ft.attention_bytes(n, n, d, 64, 128)
    # Dao et al. 2022: for usual widths and tiles far fewer than with the table in memory
    assert ft.standard_attention_bytes(n, n, d).total > 3.9 * ft.attention_bytes(n, n, d, 128, 64).total


@pytest.mark.parametrize(
    ("call", "loads", "stores"),
    [
        (lambda x, w: ft.softmax(x), 60 * 77, 60 * 77),
        (lambda x, w: ft.rms_norm(x, w), 2 * 60 * 77, 60 * 77 + 60),
        (lambda x, w: ft.bias_gelu(x, w), 2 * 60 * 77, 60 * 77),
        (lambda x, w: ft.cross_entropy(x, torch.zeros(60, dtype=torch.int64)), 60 * 77 + 60 * 3, 60 * 2),
        (lambda x, w: ft.adamw_step(x, x.clone(), x.clone(), x.clone(), 1), 4 * 60 * 77, 3 * 60 * 77),
    ],
)
def test_a_fused_kernel_moves_each_number_once(call, loads: int, stores: int) -> None:
    x, weight = torch.ones(60, 77), torch.ones(77)
    with ft.count_bytes() as count:
        call(x, weight)
    assert (count.loaded, count.stored) == (4 * loads, 4 * stores)


def test_counts_nest_and_end() -> None:
    with ft.count_bytes() as outer:
        ft.softmax(torch.ones(2, 8))
        with ft.count_bytes() as inner:
            ft.softmax(torch.ones(2, 8))
    ft.softmax(torch.ones(2, 8))
    assert (outer.total, inner.total) == (256, 128)
    assert "softmax_kernel, 2 programs: 64 B loaded, 64 B stored" in repr(inner)
