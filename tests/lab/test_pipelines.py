"""The schedule panel, a recorded pipeline as a picture, and passes that take a given time."""

import time

import pytest
import torch

pytest.importorskip("matplotlib")

from fmlab.lab.figures import png
from fmlab.lab.pipelines import NAMES, PacedModel, PacedObjective, bubble_of, schedule_panel
from fmlab.lab.timeline import schedule_view, trace_view
from fmlab.parallel.pipeline import Pass, PipelineTrace, StageTrace
from fmlab.parallel.pipeline.split_backward import SplitBackward, edge_of
from fmlab.sim.schedule import replay_schedule, schedule


def test_the_panel_draws_every_schedule_and_says_what_it_costs() -> None:
    panel = schedule_panel()
    assert "33 forward passes long, bubble 27.3%, a stage holds at most 4" in panel.summary
    for name in NAMES:
        panel.set(name=name)
        assert f"bubble {bubble_of(name, 4, 8):.1%}" in panel.summary
    panel.set(name="interleaved", micro_batches=6)
    assert "8 micro-batches (asked: 6)" in panel.summary
    panel.set(name="ZBV", stages=8, micro_batches=1)  # fewer micro-batches than stages


def test_a_recorded_step_is_drawn_with_its_bubble() -> None:
    plan = schedule("zb-h1", 2, 3)
    result = replay_schedule(plan, kind="zb-h1")
    stages = []
    for stage, todo in enumerate(plan):
        at = result.on((stage, "compute"))
        passes = [
            Pass(a, 5 + result.starts[i], 5 + result.ends[i], 1, 8) for a, i in zip(todo, at, strict=True)
        ]
        stages.append(StageTrace(stage, passes))
    trace = PipelineTrace("zb-h1", stages)
    assert trace.bubble == pytest.approx(bubble_of("ZB-H1", 2, 3))
    assert trace.seconds == pytest.approx(10)
    assert trace.mean_seconds("weight") == 1
    assert trace.order() == plan
    assert repr(trace) == "PipelineTrace(zb-h1, 2 stages, 18 passes)"
    shown = trace_view(trace)
    assert repr(shown).startswith("Figure (measured)")
    assert len(png(shown.fig)) > 5_000


def test_each_kind_of_pass_takes_its_time() -> None:
    model, pause = PacedModel(2, 0.02), 0.02
    state = model.prepare(torch.ones(1, 4)).updated(hidden=torch.ones(1, 4, requires_grad=True))
    given = state.hidden

    def seconds(action: object) -> float:
        start = time.perf_counter()
        action()  # type: ignore[operator]
        return time.perf_counter() - start

    outputs: list[torch.Tensor] = []
    forward = seconds(lambda: outputs.append(model.blocks[2](model.blocks[1](state)).hidden))
    split = SplitBackward([edge_of(outputs[0])], [edge_of(given)])
    inputs = seconds(lambda: split.input_pass([torch.ones(1, 4)]))
    weights = seconds(split.weight_pass)
    for took in (forward, inputs, weights):  # two blocks each; a busy machine may take longer
        assert took >= 2 * pause
    assert model.blocks[2].weight.grad is not None
    assert PacedObjective()(model, {"x": torch.ones(3, 4)})["sum"].count == 3


def test_a_caption_speaks_of_numbers_only_where_bars_have_them() -> None:
    for kind, chunks, numbered in (("1f1b", 1, True), ("zbv", 2, False)):  # 64 bars, 192 bars
        shown = schedule_view(replay_schedule(schedule(kind, 4, 8, chunks), kind=kind))
        assert ("Numbers are micro-batches" in repr(shown)) == numbered == bool(shown.fig.axes[0].texts)
