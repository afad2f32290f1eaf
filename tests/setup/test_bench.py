"""The frame of the benchmarks: bounds, ratios and the command, without timing anything."""

import json
from pathlib import Path

import pytest

from fmlab import bench
from fmlab.bench import Ratio, Result, command


def test_a_bound_decides_whether_a_result_is_good() -> None:
    assert Result("a", 1.2, "x", ">= 1.15").met is True
    assert Result("a", 1.1, "x", ">= 1.15").met is False
    assert Result("a", 3, "s", "<= 3").met is True
    assert Result("a", 3, "s").met is None
    with pytest.raises(ValueError, match="not a bound"):
        Result("a", 3, "s", "about 3")


def test_a_ratio_is_taken_pair_by_pair() -> None:
    # the machine slows down threefold; b is twice as slow as a throughout
    ratio = Ratio.of([1, 2, 3], [2, 4, 6])
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (2, 2, 2, 3)
    assert (ratio.seconds_a, ratio.seconds_b) == (2, 4)
    with pytest.raises(ValueError, match="same length"):
        Ratio.of([1, 2], [1])


def test_sides_take_turns_in_going_first() -> None:
    order: list[str] = []
    bench.interleaved(lambda: order.append("a"), lambda: order.append("b"), pairs=4, warmup=1)
    assert "".join(order) == "ab" + "abbaabba"


def test_the_command_prints_the_machine_first_and_fails_on_a_missed_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [Result("quick enough", 2, "s", "<= 3"), Result("too slow", 0.5, "x", ">= 1")]
    monkeypatch.setattr(command, "_load", lambda name: lambda quick: results)
    assert bench.main(["ranks", "--json", str(tmp_path / "out.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cpu ")
    assert "torch" in lines[0]
    assert "MISSED" in lines[-1]
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["met"] for row in written["results"]] == [True, False]
    assert written["machine"]["cores"] >= 1
    results.pop()
    assert bench.main(["ranks"]) == 0


def test_an_unknown_benchmark_lists_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=", ".join(bench.BENCHES)):
        bench.main(["gpt"])
