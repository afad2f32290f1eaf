"""Parts of wider rows: halves read where they lie, gradients written side by side; counted, refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.compiler import (
    CaptureError,
    Compiled,
    Fusion,
    GenerateTriton,
    JoinSlices,
    PassManager,
    Program,
    capture,
    fusing_passes,
    kernels,
    optimize,
)
from tests.compiler.test_codegen import generated, x  # skips without a compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def members(program: Program, graph: str = "forward") -> list[list[str]]:
    return [kernel.members for kernel in kernels(program.graphs[graph])]


def assert_trains_the_same(program: Program, fn: Callable[..., Tensor], *inputs: Tensor) -> None:
    compiled = Compiled(program)
    got, want = compiled(*inputs), fn(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    leaves = [each for each in inputs if each.requires_grad]
    if leaves:
        d = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=want.dtype)
        gradients = (torch.autograd.grad(y, leaves, d) for y in (got, want))
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def gated(wide: Tensor) -> Tensor:
    value, gate = wide.chunk(2, -1)
    return value * F.gelu(gate)


def test_a_gated_layer_reads_halves_where_they_lie_and_writes_their_gradients_side_by_side(
    folder: Path,
) -> None:
    wide = x(3, 5, 14).requires_grad_()
    program = generated(gated, folder, wide)
    assert members(program) == [["gelu", "mul"]]
    assert members(program, "backward") == [["mul", "mul", "gelu_backward", "cat"]]
    assert_trains_the_same(program, gated, wide)
    half = 3 * 5 * 7 * 8
    bytes_ = {graph: (r.bytes_before, r.bytes_after) for graph, r in program.reports if r.name == "fusion"}
    assert bytes_["forward"] == (5 * half, 4 * half)  # two in; the GELU for the backward graph, the result
    assert bytes_["backward"] == (13 * half, 6 * half)  # d, both halves and the GELU in; two halves out


def test_triton_moves_the_same_bytes_in_one_launch_each_way(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton, the extra `kernels`, is for Linux only")
    from fmlab.kernels.triton import count_bytes

    wide = x(3, 5, 14).requires_grad_()
    program = capture(gated, wide)
    assert isinstance(program, Program)
    optimize(program, PassManager([Fusion(), GenerateTriton(tmp_path)]))
    made = [kernel for graph in program.graphs.values() for kernel in kernels(graph)]
    assert len(made) == 2
    with count_bytes() as count:
        assert_trains_the_same(program, gated, wide)
    assert len(count.launches) == 2
    half = 3 * 5 * 7 * 8
    assert (count.loaded, count.stored) == (2 * half + 4 * half, 2 * half + 2 * half)


def test_slices_are_read_with_any_start_even_if_they_overlap_and_may_be_reduced(folder: Path) -> None:
    def fn(wide: Tensor, w: Tensor) -> Tensor:
        first, second = wide[..., :6], wide[..., 3:9]
        normed = F.layer_norm(second * 2 + first, (6,), w)
        return normed.softmax(-1) + first.softmax(-1)

    wide, w = x(2, 4, 11).requires_grad_(), x(6, seed=1)
    program = generated(fn, folder, wide, w)
    assert sum(map(len, members(program))) == 6
    assert not any("cat" in names for names in members(program, "backward"))  # their gradients overlap
    assert_trains_the_same(program, fn, wide, w)


def test_a_second_reader_gets_a_half_as_it_lies_and_a_joined_part_as_a_result_of_its_own(
    folder: Path,
) -> None:
    def fn(wide: Tensor, w: Tensor) -> Tensor:
        value, gate = wide.chunk(2, -1)
        part = gate.exp() * 2
        both = torch.cat([value + gate, part, part], -1)
        return both @ w + (value @ w[:4]) + (part @ w[4:8])  # outside of the group: value, part and both

    wide, w = x(6, 8), x(12, 3, seed=1)
    program = generated(fn, folder, wide, w)
    assert members(program)[0] == ["exp", "mul", "add", "cat"]
    (kernel, *_) = kernels(program.forward.graph)
    results = list(kernel.graph.nodes)[-1].args[0]
    assert [list(node.meta["val"].shape) for node in results] == [[6, 4], [6, 12]]
    assert_trains_the_same(program, fn, wide, w)


def test_gradients_of_slices_that_make_up_a_whole_are_joined(folder: Path) -> None:
    def fn(wide: Tensor) -> Tensor:
        return wide[..., :2] * F.gelu(wide[..., 2:4]) + wide[..., -4:-2] * wide[..., 6:]

    wide = x(3, 5, 8).requires_grad_()
    program = capture(fn, wide)
    assert isinstance(program, Program)
    optimize(program, PassManager(fusing_passes(folder)))
    (report,) = (r for graph, r in program.reports if (graph, r.name) == ("backward", "join slices"))
    assert (report.before["slice_backward"], report.before["add"]) == (4, 3)
    assert (report.after["slice_backward"], report.after["add"], report.after["cat"]) == (0, 0, 1)
    part = 3 * 5 * 2 * 8  # each padded to 4, then 3 sums of wholes; now read and written once
    assert report.bytes_before - report.bytes_after == 4 * (1 + 4) * part + 3 * 3 * 4 * part - 8 * part
    assert len(members(program, "backward")) == 1
    assert members(program, "backward")[0][-1] == "cat"
    assert_trains_the_same(program, fn, wide)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda a: a[..., :4] * a[..., 3:7], "overlap or leave a gap"),
        (lambda a: a[..., :3] * a[..., 5:], "overlap or leave a gap"),
        (lambda a: a[..., ::2] * a[..., 1::2], "with steps"),
        (lambda a: (a[..., :4] * a[:, 4:]) + a[:1, :4].exp(), "several dims"),
    ],
)
def test_gradients_of_other_slices_are_added_up(fn: Callable[[Tensor], Tensor], why: str) -> None:
    a = x(3, 8).requires_grad_()
    program = capture(fn, a)
    assert isinstance(program, Program)
    optimize(program, PassManager([JoinSlices()]))
    assert any(why in reason for reason in program.reports[-1][1].refused), program.reports[-1][1]
    assert_trains_the_same(program, fn, a)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "several widths": (lambda a: torch.cat([a.exp() * 2, a[..., :2].exp() * 2], -1), "several widths"),
    "another dim": (lambda a: torch.cat([a.exp() * 2, a.exp() + 1], 0), "another dim than the last"),
    "columns": (lambda a: torch.cat([a[:, :1].contiguous().exp() * 2] * 2, -1), "several widths, or columns"),
    "every second": (lambda a: a[..., :3].exp() * a[..., ::2] + 1, "laid out in another way"),
    "one column of each row": (lambda a: a.exp() * a[..., 1:2] + 1, "laid out in another way"),
    "overlapping rows": (
        lambda a: (b := a.view(-1).unfold(0, 4, 2)).contiguous().exp() * b + 1,
        "laid out in another way",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_part_of_rows_is_left_to_torch(case: str) -> None:
    fn, why = REFUSED[case]
    a = x(4, 6)
    program = capture(lambda a: fn(a + 0.5), a, backward=False)
    assert isinstance(program, Program)
    optimize(program, PassManager([Fusion()]))
    assert any(why in reason for reason in program.reports[-1][1].refused), program.reports[-1][1]
    torch.testing.assert_close(Compiled(program)(a), fn(a + 0.5), rtol=1e-13, atol=1e-13)


def test_no_result_takes_the_memory_of_a_part_and_other_strides_are_copied(folder: Path) -> None:
    wide = x(3, 14)
    program = generated(gated, folder, wide)
    (kernel,) = kernels(program.forward.graph)
    assert kernel.overwrites == {}
    assert kernel.code is not None
    value, gate = wide.chunk(2, -1)
    given = [gate, value] if kernel.members[0] == "gelu" else [value, gate]
    want = gated(wide)
    for halves in (given, [y.contiguous() for y in given]):
        torch.testing.assert_close(kernel.code(halves)[-1], want)
    with pytest.raises(ValueError, match=r"reads input \d again after it writes result 0"):
        kernel.code(given, [wide.view(-1)[8:29].view(3, 7)])  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="takes and writes plain tensors"):
        kernel.code([y[:2] for y in given])


def test_bounds_that_depend_on_numbers_and_writing_into_a_part_are_refused_at_capture() -> None:
    def bound(a: Tensor) -> Tensor:
        return a[..., : int(a.sum())].exp()

    def in_place(a: Tensor) -> Tensor:
        a[..., :3].mul_(2)
        return a.exp()

    for fn in (bound, in_place):
        with pytest.raises(CaptureError, match="test_wide_rows"):
            capture(fn, x(4, 6), backward=False)
