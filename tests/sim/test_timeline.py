"""Trace files, memory over time and figures of dry runs and of simulated devices."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fmlab.sim.dry import dry_run
from fmlab.sim.event import Event
from fmlab.sim.report import DryRun
from fmlab.sim.timeline import device_events, save, step_events


@pytest.fixture(scope="module")
def run() -> DryRun:
    """Four stages and two replicas of two shards."""
    return dry_run(
        "gpt2-tiny",
        host="p5.48xlarge",
        data=2,
        tensor=2,
        pipeline=2,
        micro_batches=4,
        global_batch=16,
        seq_len=64,
    )


def spans(events: list[dict[str, Any]], pid: int, tid: int) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]


def test_ranks_are_processes_and_streams_threads(run: DryRun, tmp_path: Path) -> None:
    path = run.save_trace(tmp_path / "step.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0: stage 0, replica 0, shard 0", "rank 4: stage 1, replica 0, shard 0"]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads >= {"compute", "tensor", "send forward", "reduce"}
    compute = spans(events, 0, 0)
    assert {"F0", "B3 block 0", "AdamW"} <= {e["name"] for e in compute}
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(
        run.seconds * 1e6, rel=1e-4
    )
    ends = [e["ts"] + e["dur"] for e in compute]
    assert all(end <= later["ts"] + 1e-3 for end, later in zip(ends, compute[1:], strict=False))
    assert max(e["args"]["live"] for e in events if e["ph"] == "C") == pytest.approx(run.peak_memory / 2**30)


def test_operations_fill_the_passes(run: DryRun) -> None:
    events = step_events(run, ranks=[0], detail="operations")
    outer = next(e for e in spans(events, 0, 0) if e["name"] == "F0")
    inner = [e for e in spans(events, 0, 0) + spans(events, 0, 1) if e["cat"] in ("compute", "tensor")]
    inside = [e for e in inner if outer["ts"] <= e["ts"] + 1e-6 < outer["ts"] + outer["dur"] - 1e-3]
    assert sum(e["dur"] for e in inside) == pytest.approx(outer["dur"], rel=1e-3)
    assert {"aten::addmm", "all_reduce"} <= {e["name"] for e in inside}


def test_a_rank_that_was_not_replayed_looks_like_its_stand_in(run: DryRun) -> None:
    events = step_events(run, ranks="all")
    assert [e["dur"] for e in spans(events, 3, 0)] == [e["dur"] for e in spans(events, 0, 0)]
    assert len({e["pid"] for e in events}) == 8


def test_what_cannot_be_shown_is_refused(run: DryRun) -> None:
    with pytest.raises(ValueError, match=r"ranks of 0..7"):
        step_events(run, ranks=[8])
    with pytest.raises(ValueError, match="passes, operations"):
        step_events(run, detail="kernels")  # type: ignore[arg-type]


def test_a_device_trace_takes_the_same_way(tmp_path: Path) -> None:
    trace = [
        Event("compute", "aten::mm", 2e-3, flops=10, bytes=5, live_bytes_after=2**30, module="blocks.0"),
        Event("collective", "all_reduce", 1e-3, stream=1, start=2e-3, payload_bytes=8, device=1),
    ]
    path = save(device_events(trace), tmp_path / "device.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert spans(events, 0, 0)[0]["args"]["module"] == "blocks.0"
    assert spans(events, 1, 1)[0]["ts"] == 2000
    assert [e["args"]["live"] for e in events if e["ph"] == "C"] == [1.0, 0.0]


def test_figures_say_what_they_are(run: DryRun) -> None:
    pytest.importorskip("matplotlib")
    from fmlab.lab.figures import png
    from fmlab.lab.timeline import device_timeline, memory_view, operations, schedule_view, timeline
    from fmlab.sim.schedule import replay_schedule, schedule

    shown = schedule_view(replay_schedule(schedule("interleaved", 4, 8, 2)))
    assert repr(shown).startswith("Figure (modelled): White is the bubble: 15.8 %")
    for figure in (shown, timeline(run), memory_view(run)):
        assert len(png(figure.fig)) > 10_000
    one = device_timeline([Event("compute", "aten::mm", 2e-3, phase="forward")])
    assert "1 operations" in repr(one)
    assert "FLOPs" in operations(run, 3)
    with pytest.raises(ValueError, match="expand=True"):
        timeline(run, ranks=[1])
