"""Matrix product by tiles: each program makes one tile of the result.

A program walks along the inner dimension and holds one tile of A, one of B and its sums. Each element of A
is loaded once for every column of tiles, each of B once for every row of tiles: larger tiles move fewer
bytes (`fmlab.kernels.triton.traffic.matmul_bytes`), until they no longer fit on the chip.

Shapes: A [m, k], B [k, n], C [m, n].
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmlab.kernels.triton import checks
from fmlab.kernels.triton.launch import Tuned, kernel


class Tile(NamedTuple):
    """Rows and columns of a program's tile of the result, and how far it steps along the inner dimension."""

    m: int = 64
    n: int = 64
    k: int = 32


@kernel
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # region matmul
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, K, TILE_K):
        inner = start + tl.arange(0, TILE_K)
        a_at = a_ptr + rows[:, None] * a_m + inner[None, :] * a_k
        b_at = b_ptr + inner[:, None] * b_k + columns[None, :] * b_n
        a = tl.load(a_at, mask=(rows[:, None] < M) & (inner[None, :] < K), other=0.0).to(DOT)
        b = tl.load(b_at, mask=(inner[:, None] < K) & (columns[None, :] < N), other=0.0).to(DOT)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    c_at = c_ptr + rows[:, None] * c_m + columns[None, :] * c_n
    tl.store(c_at, sums, mask=(rows[:, None] < M) & (columns[None, :] < N))
    # endregion


def matmul(a: Tensor, b: Tensor, tile: Tile | None = None) -> Tensor:
    """The product [m, n] of `a` [m, k] and `b` [k, n], summed in fp32, with gradients.

    tile: without one, `Tile()` on the CPU; on a GPU the fastest of a few, tried at the first call of a shape.
    Raises ValueError for shapes that do not fit, mixed dtypes or devices, and sides that are no tile's.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {list(a.shape)} and b {list(b.shape)}; give [m, k] and [k, n]")
    checks.same_kind(a=a, b=b)
    if tile is not None:
        tile = Tile(*tile)
        for name, size in tile._asdict().items():
            checks.tile(f"tile.{name}", size)
    product: Tensor = _TiledProduct.apply(a, b, tile)
    return product


class _TiledProduct(torch.autograd.Function):
    """Forward: a tiled product. Backward: two, with one factor transposed by its strides."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, tile: Tile | None) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.tile = tile
        return _product(a, b, tile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_c: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        d_a = _product(d_c, b.T, ctx.tile) if ctx.needs_input_grad[0] else None
        d_b = _product(a.T, d_c, ctx.tile) if ctx.needs_input_grad[1] else None
        return d_a, d_b, None


def _product(a: Tensor, b: Tensor, tile: Tile | None) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    if c.numel() == 0:
        return c
    arguments = (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride())
    if tile is None and a.is_cuda:
        fastest()[lambda meta: (triton.cdiv(m, meta["TILE_M"]), triton.cdiv(n, meta["TILE_N"]))](*arguments)
    else:
        tile = tile or Tile()
        matmul_kernel[triton.cdiv(m, tile.m), triton.cdiv(n, tile.n)](*arguments, *tile)
    return c


@cache
def fastest() -> Tuned:
    """The kernel with the fastest of these tiles for each shape, found by trying (a GPU only)."""
    tiles = [
        Tile(64, 64, 32), Tile(128, 64, 32), Tile(64, 128, 32), Tile(128, 128, 32),
        Tile(128, 128, 64), Tile(128, 256, 64),
    ]  # fmt: skip
    choices = [
        ({"TILE_M": m, "TILE_N": n, "TILE_K": k}, {"num_warps": 8 if m * n > 8192 else 4})
        for m, n, k in tiles
    ]
    return Tuned(matmul_kernel, choices, key=("M", "N", "K"))
