"""Step times: lines that add up, bubbles that are the simulator's, and what others measured."""

from dataclasses import replace
from typing import Any

import pytest

from fmlab.parallel import Layout
from fmlab.planner import gpt_shape, model_shape
from fmlab.planner.calibration import Calibration
from fmlab.planner.hardware import hardware
from fmlab.planner.passes import Pass, passes_of
from fmlab.planner.plan import Plan, plan
from fmlab.planner.setup import Setup
from fmlab.planner.time import FORMULAS, KINDS, StageTime, bubble, stage_time
from fmlab.sim import dry_run
from fmlab.sim.schedule import replay_schedule, schedule

#: nothing but what the chips' own figures say: what the simulator assumes too
FIGURES: dict[str, Any] = dict(
    rows_half=0.0, width_half=0.0, attention=1.0, memory=1.0, inside=1.0, between=1.0, hop_inside=0.0,
    hop_between=0.0, launch=0.0, hidden_gradients=1.0, hidden_gathers=1.0, reserve=0.0, context_bytes=0.0,
)  # fmt: skip


def gpt3(calibration: Calibration | None = None, recompute: str = "none", **layout: Any) -> Plan:
    usual: dict[str, Any] = dict(data=8, tensor=8, pipeline=16, micro_batches=24)
    return plan(
        "gpt3-175b",
        chip="a100-80gb",
        layout=Layout(**(usual | layout)),
        global_batch=1536,
        seq_len=2048,
        recompute=recompute,
        calibration=calibration or Calibration(),
    )


def test_lines_add_up_and_have_formulas() -> None:
    one = gpt3(sequence_parallel=True, zero=1)
    assert sum(line.value for line in one.time.values()) == pytest.approx(one.step_seconds, rel=1e-12)
    assert sum(line.value for line in one.memory.values()) == pytest.approx(one.peak_memory, rel=1e-12)
    assert all(line.formula and line.value > 0 for line in (*one.time.values(), *one.memory.values()))
    assert set(KINDS) <= set(FORMULAS)
    assert one.bound == "compute"
    assert one.mfu < one.changed(recompute="full").hfu


@pytest.mark.parametrize(
    ("kind", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zbv", 2)],
)
@pytest.mark.parametrize(("stages", "batches"), [(2, 8), (4, 8), (4, 32), (8, 16)])
def test_bubbles_are_those_of_the_simulated_schedule(
    kind: str, virtual: int, stages: int, batches: int
) -> None:
    """Equal stages, F = B = W. Exact, but for ZBV, whose first stages wait a little less."""
    forward, whole = 1.0, 2.0
    layout = Layout(pipeline=stages, micro_batches=batches, schedule=kind, virtual_stages=virtual)
    shape = model_shape("gpt3-175b")
    one = StageTime(Pass(forward), Pass(whole), Pass(), 0.0, 0.0, 0.0, forward)
    setup = Setup(shape, layout, 1, shape.lengths(8))
    ours = batches * (forward + whole) + bubble(setup, [one] * stages, 0)
    replayed = replay_schedule(
        schedule(kind, stages, batches, virtual), forward, whole, weight=1.0, kind=kind
    )
    assert ours == pytest.approx(replayed.seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "forward", "backward"),
    [
        ("none", False, 7.7, 11.9),
        ("none", True, 7.2, 11.8),
        ("full", False, 7.7, 19.5),
        ("selective", True, 7.2, 13.1),
    ],
)
def test_one_layer_of_korthikanti_table_4(
    recompute: str, sequence_parallel: bool, forward: float, backward: float
) -> None:
    """22B on 8 A100, milliseconds. Within 20 % of each, uncalibrated."""
    shape = gpt_shape(layers=48, hidden=6144, heads=64, vocab=51200, positions=2048)
    layout = Layout(tensor=8, sequence_parallel=sequence_parallel)
    setup = Setup(
        shape, layout, 4, shape.lengths(2048), attention="unfused", dropout=True, recompute=recompute
    )
    machine = hardware("a100-80gb", calibration=Calibration())
    there, back, again = passes_of(shape.layers[0], setup, machine)
    assert there.seconds * 1e3 == pytest.approx(forward, rel=0.2)
    assert (back.seconds + again.seconds) * 1e3 == pytest.approx(backward, rel=0.2)


MARGIN = 0.12  # of the step, against the simulator, for GPTs; of the memory 0.04


@pytest.mark.parametrize(
    ("name", "layout", "rows", "seq_len", "recompute"),
    [
        ("gpt2-medium", {}, 8, 1024, "none"),
        ("gpt2-medium", dict(tensor=8), 8, 1024, "none"),
        ("gpt3-175b", dict(data=8, tensor=8, pipeline=16, micro_batches=24), 192, 2048, "none"),
        ("gpt3-175b", dict(tensor=8, pipeline=8, micro_batches=16, sequence_parallel=True), 16, 2048, "full"),
    ],
)
def test_the_simulator_is_of_the_same_opinion(
    name: str, layout: dict[str, Any], rows: int, seq_len: int, recompute: str
) -> None:
    """With the chips' figures and nothing calibrated, plan and dry run agree within the margins stated above.

    What a plan has not: kernels' own quirks, messages that wait for others on the same wire.
    """
    other = dry_run(
        name, host="p4de.24xlarge", global_batch=rows, seq_len=seq_len, recompute=recompute, **layout
    )
    one = plan(
        name,
        chip="a100-80gb",
        layout=Layout(**layout),
        global_batch=rows,
        seq_len=seq_len,
        recompute=recompute,
        calibration=Calibration(matmul={"a100-80gb": 1.0}, **FIGURES),
    )
    assert one.step_seconds == pytest.approx(other.seconds, rel=MARGIN)
    assert one.peak_memory == pytest.approx(other.peak_memory, rel=0.04)
    assert one.flops.model == pytest.approx(other.model_flops(), rel=1e-4)  # its vocabulary is padded


def test_time_falls_where_it_must() -> None:
    base = gpt3()
    for faster in (
        Calibration(matmul={"a100-80gb": 0.95}),
        Calibration(inside=0.95),
        Calibration(between=0.95),
        Calibration(memory=0.95),
        Calibration(hidden_pipeline=0.5),
        Calibration(hidden_tensor=0.5),
    ):
        assert gpt3(faster).step_seconds < base.step_seconds
    for slower in (Calibration(step=1.0), Calibration(hidden_gradients=0.0), Calibration(rows_half=512.0)):
        assert gpt3(slower).step_seconds > base.step_seconds
    assert gpt3(schedule="interleaved", virtual_stages=2, micro_batches=32).bubble < base.bubble
    assert gpt3(recompute="full").step_seconds > base.step_seconds
    seconds = [gpt3(data=d, micro_batches=192 // d).step_seconds for d in (4, 8, 16)]
    assert seconds == sorted(seconds, reverse=True)
    near = gpt3(tensor=8, pipeline=16)
    far = gpt3(tensor=16, pipeline=8)  # the tensor group no longer fits a host
    assert far.time["tensor messages"].value > 3 * near.time["tensor messages"].value


def test_small_models_are_bound_by_the_host_that_starts_kernels() -> None:
    small = plan("gpt2", chip="h100", global_batch=1, seq_len=64, calibration=Calibration(launch=200e-6))
    assert small.bound == "host"
    assert small.step_seconds >= 12 * 3 * 200e-6
    compiled = plan("gpt2", chip="tpu-v5e", global_batch=1, seq_len=64)
    assert "launches" not in compiled.time


def test_experts_contexts_and_pictures_are_priced() -> None:
    moe = plan(
        "mixtral-8x7b", chip="h100", layout=Layout(data=16, expert=8, zero=1), global_batch=64, seq_len=4096
    )
    assert moe.time["expert messages"].value > 0
    ring = plan("llama3.1-8b", chip="h100", layout=Layout(context=8), global_batch=1, seq_len=131072)
    assert ring.time["context messages"].value > 0
    worse = ring.changed(context_balance="none")
    assert 1.7 < worse.time["attention"].value / ring.time["attention"].value < 1.9
    heads = ring.changed(context_method="ulysses")
    assert heads.step_seconds > 0
    picture = plan("sd-1.5", chip="a100-80gb", global_batch=8)
    assert picture.samples_per_second > 1
    assert plan("clip-vit-l-14", chip="tpu-v5p", layout=Layout(data=64), global_batch=4096).fits


def test_the_slowest_stage_sets_the_pace() -> None:
    one = gpt3()
    times = [stage_time(one.setup, stage, one.machine) for stage in range(16)]
    pace = max(time.seconds for time in times)
    assert times[-1].forward.products > times[1].forward.products  # the output matrix
    passes = 24 * pace + sum(time.seconds for time in times) - pace
    named = ("gradient messages", "tied tables", "optimizer")
    assert one.step_seconds == pytest.approx(passes + sum(one.time[name].value for name in named))
    assert replace(one.setup, rows=1).shards == 8


def test_layers_that_stay_gathered_are_not_gathered_again() -> None:
    """And a plan remembers nothing of another one that gave them back."""
    settings: dict[str, Any] = dict(chip="h100", chips=64, global_batch=64, seq_len=128)
    again = plan("llama3.1-8b", layout=Layout(data=64, fsdp=True), **settings)
    once = again.changed(reshard=False)
    assert once.time["gathered weights"].value < again.time["gathered weights"].value
