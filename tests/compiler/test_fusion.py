"""Fusion: which groups are made, what they move, counted, where it must stop; values and gradients kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.compiler import (
    Compiled,
    CostModel,
    Fusion,
    PassManager,
    Program,
    Report,
    SplitBias,
    capture,
    kernels,
    optimize,
)
from fmlab.compiler import graph as g


def fused(fn: Callable[..., Any], *inputs: Tensor, cost: CostModel | None = None) -> tuple[Program, Report]:
    """The program and the report on its forward graph, after a comparison with eager."""
    backward = any(x.requires_grad for x in inputs)
    program = capture(fn, *inputs, backward=backward)
    assert isinstance(program, Program)
    optimize(program, PassManager([SplitBias(), Fusion(cost)]))
    compiled = Compiled(program)
    want, got = fn(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    if backward:
        leaves = [x for x in inputs if x.requires_grad]
        first, expected = (x[0] if isinstance(x, tuple) else x for x in (got, want))
        torch.testing.assert_close(
            torch.autograd.grad(first.square().sum(), leaves, allow_unused=True),
            torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True),
        )
    return program, [report for graph, report in program.reports if graph == "forward"][-1]


def groups(program: Program) -> list[list[str]]:
    return [kernel.members for kernel in kernels(program.forward.graph)]


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or (4, 6), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_chain_becomes_one_group_that_reads_and_writes_its_memory_once() -> None:
    a, b = x(), x(seed=1)
    program, report = fused(lambda a, b: (a * 2 + b).relu().exp() - a, a, b)
    assert groups(program) == [["mul", "add", "relu", "exp", "sub"]]
    size = a.numel() * 8
    assert report.bytes_before == (2 + 3 + 2 + 2 + 3) * size
    assert report.bytes_after == 3 * size  # a and b in, one result out
    assert dict(report.made) == {"group": 1, "node fused": 5}


def test_bias_and_gelu_are_one_group_unless_the_sum_has_a_second_reader() -> None:
    h, w, b = x(), x(6, 5, seed=1), x(5, seed=2)
    program, report = fused(lambda h, w, b: F.gelu(torch.addmm(b, h, w)), h, w, b)
    assert groups(program) == [["add", "gelu"]]
    product = 4 * 5 * 8
    assert report.bytes_after == (h.nbytes + w.nbytes + product) + (product + b.nbytes + product)
    program, _ = fused(lambda h, w, b: (F.gelu(s := torch.addmm(b, h, w)), s @ s.T), h, w, b)
    assert groups(program) == []


def test_in_training_the_product_is_kept_and_no_sum_is_ever_written() -> None:
    def layer(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(h, w, b))

    inputs = [y.requires_grad_() for y in (x(2, 4, 6), x(5, 6, seed=1), x(5, seed=2))]
    program, _ = fused(layer, *inputs)
    plain = capture(layer, *inputs)
    assert isinstance(plain, Program)
    optimize(plain, PassManager([Fusion()]))
    assert groups(program) == [["add", "gelu"]]
    assert [k.members for k in kernels(program.graphs["backward"])] == [["add", "gelu_backward", "sum"]]
    moved = [{name: g.moved_bytes(graph) for name, graph in p.graphs.items()} for p in (plain, program)]
    assert moved[1]["forward"] == moved[0]["forward"]  # though addmm's own spreading of the bias is gone
    assert moved[1]["backward"] == moved[0]["backward"] + inputs[2].nbytes
    assert program.saved_bytes == plain.saved_bytes
    split = next(report for _, report in program.copy().reports if report.name == "split bias")
    assert dict(split.made) == {"split": 1, "product kept": 1}


UNSPLIT: dict[str, tuple[Callable[..., Any], str]] = {
    "factor": (lambda h, w, b: F.gelu(torch.addmm(b, h, w, alpha=2)), "has a factor"),
    "no reader": (lambda h, w, b: torch.addmm(b, h, w) @ w.T, "nothing that reads it"),
    "two readers": (lambda h, w, b: F.gelu(s := torch.addmm(b, h, w)) @ (s.T @ h), "several readers"),
    "a result": (lambda h, w, b: (F.gelu(s := torch.addmm(b, h, w)), s), "needed as such"),
    "a gradient that needs it": (lambda h, w, b: torch.addmm(b, h, w).abs() * 2, "needed as such"),
}


@pytest.mark.parametrize("case", UNSPLIT)
def test_a_bias_is_split_off_only_where_that_saves(case: str) -> None:
    fn, why = UNSPLIT[case]
    program, _ = fused(fn, *(y.requires_grad_() for y in (x(), x(6, 5, seed=1), x(5, seed=2))))
    (report,) = (r for graph, r in program.reports if (graph, r.name) == ("forward", "split bias"))
    assert report.bytes_after == report.bytes_before
    assert any(why in reason for reason in report.refused), report.refused


def test_rows_columns_and_numbers_are_broadcast_inside_a_group_and_softmax_and_norms_join() -> None:
    a, row, number = x(2, 3, 6), x(6, seed=1), torch.tensor(0.3, dtype=torch.float64)

    def fn(a: Tensor, row: Tensor, number: Tensor) -> Tensor:
        scaled = F.layer_norm(a + row, (6,)) * number
        return (scaled - scaled.mean(-1, keepdim=True)).softmax(-1) * row

    program, report = fused(fn, a.requires_grad_(), row.requires_grad_(), number)
    assert groups(program) == [["add", "native_layer_norm", "mul", "mean", "sub", "_softmax", "mul"]]
    assert report.bytes_after < report.bytes_before / 2
    assert kernels(program.graphs["backward"])


STOPS: dict[str, tuple[Callable[..., Any], str]] = {
    "another dim": (lambda a: a.exp().softmax(0).sin(), "over another dim"),
    "another broadcast": (lambda a: (a.view(2, 2, 6) * a[:2].view(2, 1, 6).exp()).exp(), "broadcast"),
    "another order": (lambda a: a.exp().t() * 2 + 1, "t: not a fusible operator"),
    "whole numbers": (lambda a: (a.exp() * torch.arange(6)).exp(), "broadcast or laid out"),
}


@pytest.mark.parametrize("case", STOPS)
def test_fusion_stops_at(case: str) -> None:
    fn, why = STOPS[case]
    program, report = fused(fn, x())
    assert all(len(members) < 3 for members in groups(program))
    assert any(why in reason for reason in report.refused), report.refused


def test_a_way_out_and_back_is_a_circle() -> None:
    def fn(a: Tensor, w: Tensor) -> Tensor:
        y = a.exp()
        return y * 2 + y @ w  # the product needs exp, and the sum needs the product

    program, report = fused(fn, x(), x(6, 6, seed=1))
    assert groups(program) == [["exp", "mul"]]
    assert any("close a circle" in reason for reason in report.refused)


def test_two_groups_never_wait_for_each_other() -> None:
    def fn(a: Tensor, w: Tensor) -> Tensor:
        one, two = a.exp(), (a * 3).sin()  # sin is not fusible: between exp and what follows
        up, down = one @ w, two @ w
        return (up.relu() + two.relu()) * (down.relu() + one.relu())

    fused(fn, x().requires_grad_(), x(6, 6, seed=1))


def test_results_of_a_group_are_tensors_of_their_own() -> None:
    program, _ = fused(lambda a: ((b := a.exp() * 2), b.view(-1), b + 1), x())
    first, second, third = Compiled(program)(x())
    before = third.clone()
    first.zero_()
    assert second.abs().sum() == 0  # a view of the first, as in eager
    torch.testing.assert_close(third, before)


def test_the_cost_model_decides() -> None:
    a, size = x(), 4 * 6 * 8
    assert groups(fused(lambda a: a.exp().relu(), a, cost=CostModel(least_bytes=2 * size - 1))[0])
    program, report = fused(lambda a: a.exp().relu(), a, cost=CostModel(least_bytes=2 * size))
    assert not groups(program)
    assert "too few bytes" in report.refused[0]


def test_what_is_cheap_is_computed_again_rather_than_written_and_read() -> None:
    def fn(a: Tensor, w: Tensor) -> Tensor:
        y = a * 2
        return (y + y.exp() @ w).exp()

    a, w, size = x(6, 6), x(6, 6, seed=1), 6 * 6 * 8
    program, report = fused(fn, a, w)
    assert groups(program) == [["mul", "exp"], ["mul", "add", "exp"]]
    assert report.bytes_after == (2 + 3 + 3) * size  # and not 3 + 3 + 3
    assert report.made["computed again"] == 1
    assert groups(fused(fn, a, w, cost=CostModel(flops_per_byte=0.0))[0]) == [["mul", "exp"], ["add", "exp"]]
