"""Graphs run in one block: equal values, no two tensors in one place, and the peak that was planned."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fmlab.compiler import (
    Compiled,
    PassManager,
    Program,
    capture,
    default_passes,
    fusing_passes,
    optimize,
    plan_memory,
)
from fmlab.compiler.memory import PlacedRunner
from fmlab.compiler.runner import Runner
from fmlab.meter import peak_memory
from tests.compiler.families import step
from tests.compiler.same import assert_same
from tests.compiler.test_memory import assert_no_two_share


def inputs_of(graph: torch.fx.Graph) -> list[Tensor]:
    """Numbers for a graph's inputs, in the memory order that they were captured in."""
    values = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    made = []
    for i, x in enumerate(values):
        real = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        numbers = torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).abs() + 0.1
        made.append(real.copy_(numbers) if x.is_floating_point() else real.zero_())
    return made


@pytest.mark.parametrize("family", ["gpt", "resnet", "fused"])
def test_the_block_and_what_lies_outside_of_it_are_the_measured_peak(family: str, tmp_path: Path) -> None:
    model, inputs = step("gpt" if family == "fused" else family)
    program = capture(model, kwargs=inputs)
    assert isinstance(program, Program)
    optimize(program, PassManager(fusing_passes(tmp_path) if family == "fused" else default_passes()))
    for module in (program.forward, program.backward):
        assert module is not None
        placed = PlacedRunner(module)
        given = inputs_of(module.graph)
        want = Runner(module)(list(given))
        held = list(given)  # the caller's
        with peak_memory() as memory:
            got = placed(given)
        assert memory.peak == placed.peak
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        del held
        assert_no_two_share(placed.plan)
        assert placed.plan.peak <= placed.block < placed.plan.total
        inside = sum(one.nbytes for one in placed.plan.lifetimes)
        assert inside > 0
    assert_same(Compiled(program, one_block=True), model, inputs, most=1e-11)


def test_what_is_not_placed_is_named_with_its_reason() -> None:
    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        b = (a @ a).exp()
        c = b * 2
        d = torch.ops.aten.native_layer_norm(c, [6], None, None, 1e-5)[0]  # is not told where to write
        return (d + b).sin(), b

    a = torch.randn(6, 6)
    program = capture(fn, a, backward=False)
    assert isinstance(program, Program)
    placed = PlacedRunner(program.forward)
    torch.testing.assert_close(placed([a]), list(fn(a)))
    assert {life.name for life in placed.plan.lifetimes} == {"mm", "mul", "add"}
    assert placed.unplaced["native_layer_norm"].startswith("its out= variant makes")
    assert "caller gets it" in placed.unplaced["exp"]
    assert "caller gets it" in placed.unplaced["sin"]
    first, second = placed([a]), placed([a + 1])  # results of one call outlive the next
    torch.testing.assert_close(first, list(fn(a)))
    torch.testing.assert_close(second, list(fn(a + 1)))


def in_place(folder: Path) -> Program:
    """A product whose bias and GELU go to the product's own memory."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.gelu(a @ a + b) @ a

    program = capture(fn, torch.randn(6, 6), torch.randn(6), backward=False)
    assert isinstance(program, Program)
    optimize(program, PassManager(fusing_passes(folder)))
    return program


def test_a_group_overwrites_what_is_read_last_and_only_that(tmp_path: Path) -> None:
    program = in_place(tmp_path)
    nodes = list(program.forward.graph.nodes)
    if program.reports[-1][1].made["result in place"] == 0:
        pytest.skip("no C++ compiler")
    size, plan = 6 * 6 * 4, plan_memory(program.forward.graph)
    assert [life.name for life in plan.lifetimes] == ["mm", "mm_1"]
    assert plan.peak == 2 * size
    a, b = torch.randn(6, 6), torch.randn(6)
    before = a.clone(), b.clone()
    with peak_memory() as memory:
        (got,) = Runner(program.forward)([a, b])
    assert memory.peak == plan.peak
    torch.testing.assert_close(got, torch.nn.functional.gelu(a @ a + b) @ a)
    torch.testing.assert_close((a, b), before, rtol=0, atol=0)  # inputs are the caller's
    group = next(node for node in nodes if "overwrites" in node.meta)
    product, after = next(n for n in nodes if n.name == "mm"), next(n for n in nodes if n.name == "mm_1")
    after.args = (product, after.args[1])  # read once more, after it was overwritten
    assert group.meta["overwrites"]
    with pytest.raises(ValueError, match="run InPlace last"):
        Runner(program.forward)
