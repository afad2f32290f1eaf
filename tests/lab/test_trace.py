"""Reading a profiler's trace: what contains what, and own times that add up to the whole."""

import json
from pathlib import Path

import pytest
import torch

from fmlab.lab.trace import nested, own_seconds, read_trace


def test_own_time_is_what_the_spans_inside_leave() -> None:
    events = [("inner", 10.0, 20.0), ("outer", 0.0, 100.0), ("leaf", 12.0, 5.0), ("after", 100.0, 7.0)]
    spans = {span.name: span for span in nested(events)}
    own = {name: round(span.own * 1e6) for name, span in spans.items()}
    assert own == {"outer": 80, "inner": 15, "leaf": 5, "after": 7}
    assert spans["leaf"].within == ("outer", "inner")
    assert spans["after"].within == ()


def test_a_real_trace_adds_up(tmp_path: Path) -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, torch.profiler.record_function("mine"):
        torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
    profile.export_chrome_trace(str(tmp_path / "t.json"))
    spans = read_trace(tmp_path / "t.json")
    (mine,) = [span for span in spans if span.name == "mine"]
    products = [span for span in spans if span.name == "aten::mm"]
    assert products
    assert all(span.within[0] == "mine" for span in products)
    inside = own_seconds(spans, lambda span: "all" if "mine" in (span.name, *span.within) else None)
    assert inside["all"] == pytest.approx(mine.seconds, rel=1e-6)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="no trace"):
        read_trace(tmp_path / "x.json")
