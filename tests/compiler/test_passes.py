"""Each pass on the graphs: what it does, counted; what it must leave alone; and that values stay."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fmlab.compiler import (
    Algebra,
    CommonSubexpressions,
    Compiled,
    ConstantFolding,
    DeadCode,
    Layout,
    Pass,
    PassManager,
    Program,
    Report,
    ShapePropagation,
    capture,
    compile,
    optimize,
)


def applied(fn: Callable[..., Tensor], one: Pass, *inputs: Tensor) -> Report:
    """The report on the forward graph, after values and gradients were compared with eager's."""
    grads = any(x.requires_grad for x in inputs)
    program = capture(fn, *inputs, backward=grads)
    assert isinstance(program, Program)
    optimize(program, PassManager([one]))
    compiled = Compiled(program)
    want, got = fn(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got), torch.signbit(want))
    if grads:
        leaves = [x for x in inputs if x.requires_grad]
        expected = torch.autograd.grad(want.nansum(), leaves, allow_unused=True)
        found = torch.autograd.grad(got.nansum(), leaves, allow_unused=True)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    return next(report for graph, report in program.reports if graph == "forward")


def x(*shape: int) -> Tensor:
    """Numbers, a NaN, infinities and both zeros."""
    made = torch.randn(shape or (4, 6), generator=torch.Generator().manual_seed(0))
    made.view(-1)[:5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    return made.requires_grad_()


def test_constants_are_worked_out_once_but_not_those_that_the_caller_gets() -> None:
    report = applied(lambda a: a * torch.arange(6).float().exp(), ConstantFolding(), x())
    assert report.made["folded"] == 1
    assert report.after.total() == 1
    program = capture(lambda a: (a * 2, torch.arange(6) * 2), x())
    optimize(program, PassManager([ConstantFolding()]))
    first, second = Compiled(program)(x()), Compiled(program)(x())
    first[1].zero_()
    assert second[1].tolist() == [0, 2, 4, 6, 8, 10]
    assert "given to the caller" in program.reports[0][1].refused[0]
    assert applied(lambda a: a + torch.full((4, 6), 2.0).exp(), ConstantFolding(8), x()).refused


def test_a_tensor_that_the_function_refers_to_is_no_constant() -> None:
    table = torch.ones(6)
    compiled = compile(lambda a: a * (table + 1), x(), passes=[ConstantFolding()])
    table.fill_(2.0)
    torch.testing.assert_close(compiled(x()), x() * 3, equal_nan=True)


def test_common_subexpressions_are_joined_but_not_random_numbers_nor_results() -> None:
    report = applied(lambda a: a.exp() * (a.exp() + a.exp().sin()), CommonSubexpressions(), x())
    assert report.before["exp"] == 3
    assert report.after["exp"] == 1
    noisy = capture(lambda a: a * torch.rand(6) + torch.rand(6), x())
    optimize(noisy, PassManager([CommonSubexpressions(), DeadCode()]))
    assert noisy.reports[0][1].after["rand"] == 2
    two = compile(lambda a: (a.exp(), a.exp()), x(), passes=[CommonSubexpressions()])
    first, second = two(x())
    assert first.data_ptr() != second.data_ptr()
    # 1 and True, 0.0 and -0.0 are equal in Python and not here
    report = applied(lambda a: (a * 0.0) + (a * -0.0).sign() / (a * -0.0), CommonSubexpressions(), x())
    assert report.after["mul"] == 2


def test_dead_code_goes_and_random_numbers_stay() -> None:
    def fn(a: Tensor) -> Tensor:
        torch.rand(3)
        return a * torch.rand(6)

    program = capture(fn, x())
    graph = program.forward.graph
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        dead = graph.call_function(torch.ops.aten.exp.default, (next(iter(graph.nodes)),))
    dead.meta["val"] = next(iter(graph.nodes)).meta["val"]
    report = DeadCode().run(graph)
    assert report.made["dropped"] == 1
    assert report.after["rand"] == report.before["rand"]
    torch.manual_seed(1)
    want = fn(x())
    torch.manual_seed(1)
    torch.testing.assert_close(Compiled(program)(x()), want, equal_nan=True)


def test_shapes_are_worked_out_anew() -> None:
    program = capture(lambda a: (a @ a.T).double().sum(0), x())
    nodes = [n for n in program.forward.graph.nodes if n.op == "call_function"]
    wanted = [n.meta["val"] for n in nodes]
    for node in nodes:
        node.meta["val"] = wanted[0]
    report = ShapePropagation().run(program.forward.graph)
    assert report.made["known"] == len(nodes)
    for node, want in zip(nodes, wanted, strict=True):
        assert (node.meta["val"].shape, node.meta["val"].dtype) == (want.shape, want.dtype)


KEPT = {
    "x*1": lambda a: (a * 1).exp(),
    "1*x": lambda a: (1 * a).exp(),
    "x-0": lambda a: (a - 0).exp(),
    "x/1": lambda a: (a / 1).exp(),
    "x**1": lambda a: (a**1).exp(),
    "-(-x)": lambda a: a.neg().neg().exp(),
    "x**2 as x*x": lambda a: (a**2).exp(),
    "x/c as x*(1/c)": lambda a: (a / 8).exp(),
    "cast there and back": lambda a: a.double().float().exp(),
    "cast to its own dtype": lambda a: torch.ops.aten._to_copy(a, dtype=torch.float32).exp(),
    "view of a view": lambda a: a.exp().view(24).view(2, 12).sin(),
    "view of its own shape": lambda a: a.view(4, 6).exp(),
}


@pytest.mark.parametrize("rule", KEPT)
def test_algebra_keeps_every_bit(rule: str) -> None:
    name = "x*1" if rule == "1*x" else rule
    assert applied(KEPT[rule], Algebra(), x()).made[name] == 1


LEFT = {
    "x+0 of floats": (lambda a: a + 0, "-0.0"),
    "x/3": (lambda a: a / 3, "last bit"),
    "a narrow cast": (lambda a: a.bfloat16().float().exp(), "rounds on the way"),
    "another dtype": (lambda a: (a > 0) * 1.0, "changes shape or dtype"),
    "a result of its own": (lambda a: a * 1, "tensor of its own"),
}


@pytest.mark.parametrize("case", LEFT)
def test_algebra_leaves_alone_what_would_change_a_bit(case: str) -> None:
    fn, why = LEFT[case]
    report = applied(fn, Algebra(), x() if case != "another dtype" else x().detach())
    assert not report.made
    assert why in report.refused[0]


def test_fast_algebra_is_asked_for() -> None:
    program = capture(lambda a: ((a + 0) / 3).exp(), x())
    optimize(program, PassManager([Algebra(fast=True)]))
    assert dict(program.reports[0][1].made) == {"x+0": 1, "x/c as x*(1/c)": 1}


def test_layout_cancels_orders_of_dims_and_the_copies_between() -> None:
    def fn(a: Tensor) -> Tensor:
        b = a.permute(2, 0, 1).relu().permute(1, 2, 0)  # back where it was, around a relu
        return b.transpose(0, 1).transpose(1, 2).exp() * 2

    report = applied(fn, Layout(), x(2, 3, 4))
    assert report.made["pushed"] == 1
    assert report.made["cancelled"] == 1
    assert report.made["composed"] == 1
    assert applied(fn, Layout(), x(2, 3, 4).detach()).after["permute"] == 1
    copies = applied(lambda a: a.exp().clone().sin(), Layout(), x())
    assert copies.made["copy dropped"] == 1
    assert copies.bytes_after < copies.bytes_before
    assert "tensor of its own" in applied(lambda a: a.exp().clone(), Layout(), x()).refused[0]

    def two_readers(a: Tensor) -> Tensor:
        t = a.transpose(0, 1)
        return t.relu().transpose(0, 1).sum() + t.sin().sum()

    report = applied(two_readers, Layout(), x())
    assert not report.made
    assert "second reader" in report.refused[0]


def test_a_manager_can_be_stepped_and_prints_what_went_and_came(capsys: pytest.CaptureFixture[str]) -> None:
    program = capture(lambda a: (a.double().float() * 1).exp(), x())
    manager = PassManager([Algebra(), CommonSubexpressions()])
    steps = manager.steps(program.graphs)
    first = next(steps)
    assert first.graph == "forward"
    assert first.report.changed
    assert "-_to_copy: float64[4, 6] = _to_copy(" in first.report.diff
    assert len(list(steps)) == 3
    text = str(first)
    assert "cast there and back" in text
    assert "4 -> 1 nodes" in text
    manager.run(program.graphs, show=True)
    assert capsys.readouterr().out.count("nothing to do") == 4
