"""Kernels are interpreted or compiled, launch by launch; what would be quietly wrong is refused."""

import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton, the extra `kernels`, is for Linux only")
import triton.language as tl  # noqa: E402

from fmlab.kernels import triton as ft  # noqa: E402
from fmlab.kernels.triton import kernel  # noqa: E402


@kernel
def sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    tl.store(y_ptr, tl.sum(x * 2.0, axis=0))


def test_bf16_arithmetic_in_the_interpreter_is_refused_not_wrong() -> None:
    x, y = torch.tensor([1.5, 2.5, -8.0]).bfloat16(), torch.zeros(1)
    sum_kernel[(1,)](x, y, 3, 16, True)
    assert y.item() == -8.0
    with pytest.raises(
        ValueError, match=r"sum_kernel: arithmetic on bf16.*tl.load\(\.\.\.\)\.to\(tl\.float32\)"
    ):
        sum_kernel[(1,)](x, y, 3, 16, False)


@kernel
def round_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    x = torch.cat([torch.randn(1012, generator=torch.Generator().manual_seed(0)), torch.zeros(12)])
    x[-8:] = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-40, float("inf"), -float("inf"), 1.9999, -1.0]
    )
    y = torch.zeros(1024, dtype=torch.bfloat16)
    round_kernel[(1,)](x, y, 1024)
    assert torch.equal(y, x.bfloat16())


def test_interpreting_leaves_triton_as_it_was() -> None:
    before = {name: getattr(tl, name) for name in ("sum", "max", "load", "range", "reduce", "exp")}
    ft.softmax(torch.ones(2, 5))
    with pytest.raises(ValueError, match="bf16"):
        sum_kernel[(1,)](torch.ones(3).bfloat16(), torch.zeros(1), 3, 16, False)
    assert {name: getattr(tl, name) for name in before} == before
    assert isinstance(tl.sum, triton.JITFunction)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sum_kernel[(1,)](torch.ones(3), torch.ones(1), 3), "got no BLOCK, UPCAST"),
        (lambda: sum_kernel[(0,)](torch.ones(3), torch.ones(1), 3, 16, True), "each 1 or more"),
        (lambda: sum_kernel(torch.ones(3)), r"write sum_kernel\[grid\]"),
        (lambda: sum_kernel[(1,)](torch.ones(3), torch.ones(1, device="meta"), 3, 16, True), "cpu, meta"),
        (lambda: ft.matmul(torch.ones(3, 4), torch.ones(5, 3)), r"a is \[3, 4\] and b \[5, 3\]"),
        (lambda: ft.matmul(torch.ones(3, 4), torch.ones(4, 3).bfloat16()), "give all of one dtype"),
        (lambda: ft.matmul(torch.ones(3, 4).double(), torch.ones(4, 3).double()), "take float32, bfloat16"),
        (lambda: ft.matmul(torch.ones(3, 4), torch.ones(4, 3), (24, 16, 16)), "tile.m=24"),
        (lambda: ft.softmax(torch.ones(1, 70_000)), "rows of 70,000"),
        (lambda: ft.layer_norm(torch.ones(2, 4), torch.ones(5), torch.ones(4)), r"weight has shape \[5\]"),
        (lambda: ft.bias_gelu(torch.ones(2, 4), torch.ones(4), "erf"), "choose 'none'"),
        (lambda: ft.cross_entropy(torch.ones(2, 4), torch.tensor([0, 4])), "target 4 is not in a vocabulary"),
        (lambda: ft.cross_entropy(torch.ones(2, 4), torch.tensor([0, 1, 2])), "targets has shape"),
        (lambda: ft.adamw_step(*[torch.ones(4, 4).T[:, :2]] * 4, step=1), "not contiguous"),
        (lambda: ft.adamw_step(*[torch.ones(4)] * 4, step=0), "steps count from 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_a_kernel_with_tiles_to_try_is_made_without_a_gpu_and_counts_nothing_on_one() -> None:
    from fmlab.kernels.triton.matrix_product import fastest

    assert fastest().tried == ("TILE_M", "TILE_N", "TILE_K")
    with ft.count_bytes(), pytest.raises(ValueError, match="counted in the interpreter"):
        fastest()[(1,)](torch.ones(1))


def test_triton_s_own_switch_still_interprets_and_says_what_it_forbids() -> None:
    code = """
import torch
from fmlab.kernels import triton as ft
with ft.count_bytes() as count:
    print(ft.softmax(torch.zeros(1, 4)).tolist())
try:
    ft.compile_for(count.launches[0], "sm_80")
except RuntimeError as error:
    print(error)
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], env={"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert "[[0.25, 0.25, 0.25, 0.25]]" in answer.stdout, answer.stderr
    assert "TRITON_INTERPRET=1, so it can only interpret" in answer.stdout
