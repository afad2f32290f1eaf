"""Plans of memory against what is measured, and recompute against its budget."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.compiler import (
    Compiled,
    MemoryPlan,
    PassManager,
    Program,
    Runner,
    capture,
    default_passes,
    fusing_passes,
    kernels,
    optimize,
    plan_memory,
    recompute,
)
from fmlab.meter import peak_memory
from tests.compiler.families import step
from tests.compiler.same import assert_same


def measured(program: Program, name: str) -> int:
    """The most bytes alive while a graph runs, its inputs not counted."""
    module = program.forward if name == "forward" else program.backward
    assert module is not None
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    real = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_() for x in inputs]
    run = Runner(module)
    held = list(real)  # the caller's
    with peak_memory() as memory:
        results = run(real)
    del results, held
    return memory.peak


@pytest.mark.parametrize("family", ["gpt", "resnet", "fused"])
def test_the_planned_peak_is_the_measured_peak(family: str, tmp_path: Path) -> None:
    model, inputs = step("gpt" if family == "fused" else family)
    program = capture(model, kwargs=inputs)
    assert isinstance(program, Program)
    if family == "fused":
        optimize(program, PassManager(fusing_passes(tmp_path)))
        if any(kernel.code is None for kernel in kernels(program.forward.graph)):
            pytest.skip("no C++ compiler, and torch's operators allocate inside a group")
    else:
        optimize(program, PassManager(default_passes()))
    for name, graph in program.graphs.items():
        plan = plan_memory(graph)
        assert plan.peak == measured(program, name), name
        assert plan.peak <= plan.block < 1.3 * plan.peak
        assert plan.block < plan.total
        assert_no_two_share(plan)


def assert_no_two_share(plan: MemoryPlan) -> None:
    lives = plan.lifetimes
    for i, one in enumerate(lives):
        for other in lives[:i]:
            apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            assert apart or not one.meets(other), (one, other)
        assert one.offset % 64 == 0


def test_a_plan_counts_views_once_and_results_to_the_end() -> None:
    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        b = a.exp()  # 4 x 8 bytes x 8, read through a view in the end
        c = b.t().sin()
        first, _ = (c * 2).max(0)
        return first, b.view(-1)

    program = capture(fn, torch.rand(8, 4, dtype=torch.float64), backward=False)
    assert isinstance(program, Program)
    plan = plan_memory(program.forward.graph)
    size = 8 * 4 * 8
    made = {life.name: life for life in plan.lifetimes}
    assert plan.nodes[made["exp"].death] == "output"
    assert plan.peak == 3 * size  # exp, sin and its double
    assert plan.peak_at == "mul"
    assert plan.total == 3 * size + 8 * (8 + 8)  # and of max, values and places
    assert "alive at most 768" in str(plan)
    assert measured(program, "forward") == plan.peak


def chain(a: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        a = F.gelu(a @ w).sin() * 2
    return a


def kept(program: Program) -> int:
    """Bytes that a forward pass leaves alive for the backward pass, the results included."""
    inputs = [torch.rand(s, dtype=torch.float64).requires_grad_() for s in SHAPES]
    with peak_memory() as memory:
        results = Compiled(program)(*inputs)
        alive = memory.live
    del results
    return alive


SHAPES = ((16, 8), (8, 8))


def test_recompute_keeps_to_its_budget_and_changes_no_gradient() -> None:
    inputs = [torch.rand(s, dtype=torch.float64).requires_grad_() for s in SHAPES]
    expected = torch.autograd.grad(chain(*inputs).sum(), inputs)
    program = capture(chain, *inputs)
    assert isinstance(program, Program)
    before, result, flops = program.saved_bytes, 16 * 8 * 8, 0
    assert kept(program) == before + result
    for share in (1.0, 0.6, 0.3, 0.0):
        program = capture(chain, *inputs)
        assert isinstance(program, Program)
        report = recompute(program, int(share * before))
        assert report.bytes_after <= share * before
        assert report.bytes_after == program.saved_bytes
        assert kept(program) == report.bytes_after + result
        assert report.flops >= flops
        flops = report.flops
        got = torch.autograd.grad(Compiled(program)(*inputs).sum(), inputs)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert flops >= 3 * 2 * 16 * 8 * 8  # with nothing kept, three of the products are done again
    assert "0 bytes kept" in str(report)


def test_cheap_work_is_done_again_first() -> None:
    inputs = [torch.rand(s, dtype=torch.float64).requires_grad_() for s in SHAPES]
    program = capture(chain, *inputs)
    assert isinstance(program, Program)
    report = recompute(program, program.saved_bytes - 1)
    assert report.flops < 2 * 16 * 8 * 8  # no product


def test_a_model_trains_the_same_with_less_kept() -> None:
    model, inputs = step("gpt")
    program = capture(model, kwargs=inputs)
    assert isinstance(program, Program)
    optimize(program, PassManager(default_passes()))
    report = recompute(program, int(0.6 * program.saved_bytes))
    assert report.bytes_after <= 0.6 * report.bytes_before
    assert_same(Compiled(program), model, inputs)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], bool, str]] = {
    "random numbers": (lambda a: F.dropout(a, 0.5, True).sin() * 3, True, "at least"),
    "no backward graph": (lambda a: a.sin(), False, "no backward graph"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_recompute_refuses(case: str) -> None:
    fn, backward, why = REFUSED[case]
    program = capture(fn, torch.rand(4, requires_grad=True), backward=backward)
    assert isinstance(program, Program)
    with pytest.raises(ValueError, match=why):
        recompute(program, 0)
