"""The graph-pass diff: what vanishes and comes, node by node and byte by byte; and the pictures of memory."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("matplotlib")

from fmlab.compiler import (
    AttentionToSDPA,
    CommonSubexpressions,
    Fusion,
    PassManager,
    Program,
    capture,
    kernels,
    optimize,
    plan_memory,
)
from fmlab.compiler import graph as g
from fmlab.lab.graph_diff import changes, cpp, graph_diff_panel, lines, size
from fmlab.lab.graph_memory import run_graph, show_plan
from fmlab.lab.written import MODELS, given


def twice(x: Tensor) -> Tensor:
    return x.exp() * (x.exp() + 1)


def test_a_change_names_what_vanished_and_what_came_and_their_bytes() -> None:
    x = torch.randn(8, 16)
    joined, fused = changes(twice, x, passes=[CommonSubexpressions(), Fusion()], backward=False)
    size_x = 8 * 16 * 4
    assert [one.op for one in joined.before] == ["exp", "exp", "add", "mul"]
    assert [one.op for one in joined.vanished] == ["exp"]
    assert not joined.new
    assert joined.report.bytes_before - joined.report.bytes_after == joined.vanished[0].moved == 2 * size_x
    assert [one.op for one in fused.after] == ["fused: exp, add, mul"]
    assert fused.kinds() == {"element by element": (3, 0), "fused": (0, 1)}
    assert sum(one.moved for one in fused.after) == fused.report.bytes_after == 2 * size_x
    assert "4 -> 3 nodes" in str(joined)
    assert "3.58 kB -> 1.02 kB" in str(fused)


def test_generated_code_is_shown_with_its_braces_indented() -> None:
    program = capture(twice, torch.randn(8, 16), backward=False)
    assert isinstance(program, Program)
    Fusion().run(program.forward.graph)
    shown = cpp(kernels(program.forward.graph)[0])
    assert " fused(void** p" in shown
    inner = next(line for line in shown.splitlines() if "f_exp" in line)
    assert inner.startswith("    ")
    assert shown.endswith("\n}")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def test_passes_on_the_source_come_first_and_then_both_graphs() -> None:
    heads = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    found = changes(attend, *heads, passes=[Fusion(), AttentionToSDPA()])
    assert [(one.graph, one.made_by) for one in found] == [
        ("source", "attention"), ("forward", "fusion"), ("backward", "fusion"),
    ]  # fmt: skip
    assert {one.op for one in found[0].vanished} >= {"matmul", "softmax"}
    assert [one.kind for one in found[0].new] == ["attention"]
    assert any(one.kind == "attention" for one in found[2].before)


def test_lines_keep_the_order_and_count_what_they_leave_out() -> None:
    (change,) = changes(
        lambda x: x.sin().sin().sin().exp() + x.exp() * x.exp(),
        torch.ones(2),
        passes=[CommonSubexpressions()],
        backward=False,
    )
    shown = lines(change)
    assert shown[0] == ("… 5 stay …", "… 5 stay …")
    assert any(right is None and left is not None for left, right in shown)
    assert lines(change, most=2)[-1][0] == f"… {len(shown) - 1} more lines …"


def test_the_panel_steps_through_passes_graphs_and_models() -> None:
    panel = graph_diff_panel()
    assert "attention, source graph" in panel.summary
    assert panel.picture.startswith(b"\x89PNG")
    panel.set(step="11 fusion", graph="backward")
    assert "fusion, backward graph" in panel.summary
    with pytest.raises(ValueError, match="legal are"):
        panel.set(step="fission")


@pytest.mark.parametrize("model", list(MODELS)[1:])
def test_every_model_of_the_panel_is_captured(model: str) -> None:
    module, inputs = given(model)
    assert isinstance(capture(module, kwargs=inputs), Program)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no model 'LSTM'"):
        given("LSTM")


def test_what_was_planned_is_what_a_run_shows() -> None:
    layer, inputs = given("GPT layer, written out")
    program = capture(layer, kwargs=inputs)
    assert isinstance(program, Program)
    optimize(program, PassManager([CommonSubexpressions()]))
    ran, plan = run_graph(program.forward), plan_memory(program.forward.graph)
    assert ran.moved == g.moved_bytes(program.forward.graph)
    assert ran.peak == plan.peak
    picture = show_plan(plan, ran.peak)
    assert picture.kind == "modelled"
    assert f"measured peak [B]: {plan.peak:,}" in "\n".join(picture.numbers)


def test_sizes_are_short() -> None:
    assert [size(n) for n in (0, 512, 131_072, 2_097_152)] == ["0 B", "512 B", "131 kB", "2.10 MB"]
