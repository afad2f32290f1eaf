"""The planner beside the published record: what docs/planner-validation.md states, and its tools."""

import csv
import math
from pathlib import Path

import planner_tables
import pytest

from fmlab.planner.calibration import Calibration, fitted
from fmlab.planner.cli import main
from fmlab.planner.fit import Constant, constants, fit
from fmlab.planner.fitted_file import fitted_on, held_out_calibrations, label
from fmlab.planner.predicted import lines, predict, setup_of
from fmlab.planner.published import PublishedRun, runs, shipped
from fmlab.planner.report import means, verdicts
from fmlab.planner.validate import by_group, compare, constant_utilisation, overall, quantile

KNOWN = tuple(run for run in runs(fully_specified=True) if not run.cannot)
ROWS = {run.id: run for run in runs()}


def test_the_page_agrees_with_the_package() -> None:
    text = planner_tables.PATH.read_text()
    assert planner_tables.generated(text) == text, "run: python scripts/planner_tables.py"


def test_the_aims_that_are_said_to_be_met_are() -> None:
    found = means(verdicts())
    assert found["calibrated"][0] <= 0.05
    assert found["calibrated"][1] <= 0.15
    assert found["held_out"][0] <= 0.10
    assert found["held_out"][1] <= 0.25
    for way in ("calibrated", "held_out"):  # at least twice as good as one constant utilisation for each chip
        baseline = found[{"calibrated": "baseline", "held_out": "baseline_held_out"}[way]]
        assert found[way][0] <= baseline[0] / 2
        assert found[way][1] <= baseline[1] / 2
    assert len(KNOWN) / len(runs(fully_specified=True)) > 0.85


def test_what_is_assumed_of_publications_is_on_the_page_with_its_reason() -> None:
    from fmlab.planner.assumed import ASSUMED

    page = planner_tables.PATH.read_text()
    assert all(f"| {what} | {why} |" in page for what, why in ASSUMED.items())


def test_constants_are_few_named_and_physical() -> None:
    used = constants(KNOWN, Calibration())
    assert len(used) < len(KNOWN) / 5
    for one in used:
        assert 0 < one.of(fitted()) <= one.most, one.name
        assert fitted_on()[label(one)]
    assert set(held_out_calibrations()) == {run.group for run in KNOWN}


def test_a_held_out_publication_was_not_seen() -> None:
    # only torchtitan has this chip: without it, the calibration has no rate of its own for it
    assert "h100-96gb fp8" in fitted().matmul
    apart = held_out_calibrations()["torchtitan"]
    assert not any("h100-96gb" in key for key in (*apart.matmul, *apart.attention_of))
    assert "h100-96gb fp8" in held_out_calibrations()["tpu-recipes"].matmul


def test_a_row_becomes_the_same_layout() -> None:
    setup = setup_of(ROWS["sc21-310.1B"], "full")
    layout = setup.layout
    assert (layout.data, layout.tensor, layout.pipeline, layout.virtual_stages) == (15, 8, 16, 2)
    assert (layout.micro_batches, setup.rows, layout.schedule) == (144, 1, "interleaved")
    # 126 layers and two tables on 16 stages of 8 chunks: one block each, the tables alone in theirs
    assert setup_of(ROWS["mbridge-058"], "none").layout.stage_cuts == tuple(range(1, 128))
    parts = lines(ROWS["sc21-310.1B"])
    assert sum(parts.values()) == pytest.approx(predict(ROWS["sc21-310.1B"]))
    assert parts["pipeline bubble"] > 0
    with pytest.raises(ValueError, match=r"mbridge-002 cannot be predicted: a mixture of experts"):
        predict(ROWS["mbridge-002"])


def test_errors_by_publication_by_hand() -> None:
    three = [run for run in KNOWN if run.group == "Megatron-LM Llama3 FP8"]
    times = dict(zip((run.id for run in three), (1.1, 0.8, 1.0), strict=True))
    (one,) = by_group(compare(lambda run: times[run.id] * run.step_seconds(), three))
    assert (one.rows, one.of) == (3, 3)
    assert one.median == pytest.approx(0.1)
    assert one.p90 == pytest.approx(0.18)  # between 0.1 and 0.2
    assert one.bias == pytest.approx(0.0)
    assert one.worst[0].error == pytest.approx(-0.2)
    assert overall([one]).median == one.median
    assert quantile([0.0, 1.0], 0.25) == 0.25
    with pytest.raises(ValueError, match="cannot be predicted"):
        compare(lambda run: 1.0, [ROWS["mbridge-002"]])
    with pytest.raises(ValueError, match="nothing was compared"):
        overall([])


def test_the_baseline_is_right_where_utilisation_is_constant() -> None:
    some = [run for run in KNOWN if run.group == "tpu-recipes"]
    baseline = constant_utilisation(some)
    ratios = [baseline(run) / run.step_seconds() for run in some]
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1)
    # a chip that it has not seen gets the typical utilisation
    assert baseline(ROWS["korth-175B-present"]) > 0


def test_a_fit_finds_constants_that_rows_were_made_with() -> None:
    """Two chips, times made with known rates: the fit comes back to them, not to its priors."""
    some = [run for run in KNOWN if run.chip in ("a100-80gb", "h100") and run.group.startswith("llm")][::4]
    truth = Calibration().changed(
        memory=0.7, matmul={"a100-80gb bf16": 0.9, "h100 bf16": 0.6, "h100 fp8": 0.5}
    )
    made = {run.id: predict(run, truth) / run.step_seconds() for run in some}

    def against(run: PublishedRun, calibration: Calibration) -> float:
        return predict(run, calibration) / made[run.id]

    found = fit(some, against, iterations=3)
    off = [abs(against(run, found) / run.step_seconds() - 1) for run in some]
    assert sorted(off)[int(0.9 * len(off))] < 0.02
    with pytest.raises(ValueError, match="nothing to fit to"):
        fit([ROWS["mbridge-002"]], predict)


def test_a_constant_keeps_its_limits() -> None:
    one = Constant("matmul", "h100 bf16", 0.8, 0.2, 1.0)
    assert one.put(Calibration(), 1.3).matmul == {"h100 bf16": 1.0}
    assert one.of(Calibration()) == 0.8
    assert one.concerns(ROWS["mpt-001"])
    assert not one.concerns(ROWS["mpt-082"])


def test_the_command_prints_the_record_and_judges_other_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["validate"]) == 0
    said = capsys.readouterr().out
    assert "mean of 14 publications" in said
    assert "LoRA: most weights are frozen" in said
    assert main(["validate", "--runs", str(shipped()), "--defaults"]) == 0
    assert "sc21-1008B" in capsys.readouterr().out
    with pytest.raises(ValueError, match="give --runs"):
        main(["validate", "--defaults"])
    empty = tmp_path / "runs.csv"
    empty.write_text(shipped().read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="no row that can be predicted"):
        main(["validate", "--runs", str(empty)])


def test_a_row_whose_layout_is_refused_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with shipped().open(newline="") as file:
        rows = list(csv.DictReader(file))[:2]
    rows[0]["heads"] = rows[0]["kv_heads"] = "3"  # two tensor ranks cannot divide them
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert main(["validate", "--runs", str(path)]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 rows" in said
    assert "not predicted: sc21-3.6B: tensor=2 cannot divide 3" in said
