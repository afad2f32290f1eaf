"""The last line of `make test` must tell the truth, whatever a step did."""

from pathlib import Path

import checks
import pytest
from summary import Count, count_junit, final_line, table

XML = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="no"/></testcase>
<testcase classname="a" name="absent"><skipped message="chromium is absent: install it"/></testcase>
<testcase classname="a" name="dirty"/>
<testcase classname="a" name="dirty"><error message="failed on teardown"/></testcase>
<testcase classname="a" name="twice"><failure message="no"/></testcase>
<testcase classname="a" name="twice"><error message="and at teardown"/></testcase>
<testcase classname="" name=""><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


def test_each_test_counts_once() -> None:
    count = count_junit("unit", 1.0, XML)
    assert (count.passed, count.failed, count.skipped) == (1, 4, 1)
    assert count.skip_reasons == ("chromium is absent: install it",)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> checks.Step:
    monkeypatch.setattr(checks, "ARTIFACTS", tmp_path)
    return checks.Step("unit", [], 60, tests=True)


@pytest.mark.parametrize(
    ("code", "xml", "failed", "note"),
    [
        (0, '<testsuite><testcase classname="a" name="b"/></testsuite>', 0, ""),
        (0, None, 0, ""),
        (3, '<testsuite><testcase classname="a" name="b"/></testsuite>', 1, "ended with code 3"),
        (5, "<testsuite/>", 1, "no test was found"),
        (-9, None, 1, "ended with code -9"),
        (None, '<testsuite><testcase classname="a" name="b"/></testsuite>', 1, "ended at its limit of 60 s"),
        (1, XML, 4, ""),
    ],
)
def test_no_failure_of_a_step_is_lost(
    step: checks.Step, code: int | None, xml: str | None, failed: int, note: str
) -> None:
    if xml is not None:
        (checks.ARTIFACTS / "unit.xml").write_text(xml)
    count = checks.count(step, code, 1.0)
    assert (count.failed, count.note) == (failed, note)


def test_the_last_line_adds_up() -> None:
    counts = [Count("lint", 1, passed=1), Count("unit", 2, 10, 2, 3)]
    assert final_line(counts) == "11 passed, 2 failed, 3 skipped"
    assert "FAILED" in table(counts)


def test_a_step_that_hangs_is_ended_with_all_that_it_started(step: checks.Step, tmp_path: Path) -> None:
    marker = tmp_path / "still here"
    code = f"sleep 3 && touch '{marker}' & sleep 60"
    hanging = checks.Step("unit", ["sh", "-c", code], 1, tests=True)
    count = checks.run(hanging)
    assert count.failed == 1
    assert count.seconds < 3
    import time

    time.sleep(2.5)
    assert not marker.exists()


def test_every_step_is_bounded_and_ci_stays_under_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "ARTIFACTS", tmp_path)
    steps = checks.steps(quick=False, strict=True, cores=2)
    assert checks.TOGETHER <= 80 * 60
    assert all(step.seconds <= checks.TOGETHER / 2 for step in steps)
    assert checks.in_time(steps[0], 10_000) == steps[0]
    assert [checks.in_time(steps[0], left).seconds for left in (12.5, -3)] == [12.5, 1]
    strict = [step.name for step in steps if "--strict-system" in step.command]
    assert strict == ["unit", "ranks", "launched", "matrix", "browser"]
    absent = checks.steps(quick=False, strict=True, cores=2, without_xla="no package for this system")
    left_out = [checks.run(step) for step in absent if step.absent]
    assert [(count.skipped, count.failed) for count in left_out] == [(1, 0)] * 2
    assert left_out[0].skip_reasons == ("no package for this system",)
    assert not [step for step in checks.steps(True, False, 2) if "--strict-system" in step.command]


def test_each_notebook_runs_in_the_kernel_that_it_names(tmp_path: Path) -> None:
    folder = tmp_path / "notebooks" / "1_part"
    folder.mkdir(parents=True)
    for name, kernel in (("1.1_a", "python3"), ("1.11_b", "fmlab-xla"), ("1.2_broken", "")):
        text = f'{{"metadata": {{"kernelspec": {{"name": "{kernel}"}}}}}}' if kernel else "{"
        (folder / f"{name}.ipynb").write_text(text)
    assert checks.notebooks(tmp_path, "fmlab-xla") == ["notebooks/1_part/1.11_b.ipynb"]
    here = [Path(name).stem for name in checks.notebooks(tmp_path)]
    assert here == ["1.1_a", "1.2_broken"], "what cannot be read fails where it is seen"
