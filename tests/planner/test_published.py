"""The published record: each row is read or refused by name; rates mean what their source means."""

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from fmlab.chips import chips
from fmlab.planner.published import COLUMNS, PublishedRun, groups, runs, shipped
from fmlab.planner.reported import convention_ratio, flops_per_token

ROWS = {run.id: run for run in runs()}


def test_every_row_is_there_with_its_source() -> None:
    assert len(ROWS) == 665
    assert len(groups()) == 26
    assert all(run.source and run.group for run in ROWS.values())
    assert sum(run.fully_specified for run in ROWS.values()) == 324


def test_a_row_is_typed() -> None:
    run = ROWS["sc21-76.1B"]
    assert (run.layers, run.hidden, run.heads, run.vocab, run.seq_len) == (60, 10240, 80, 51200, 2048)
    assert (run.chip, run.chips, run.precision) == ("a100-80gb", 1024, "fp16")
    assert (run.data, run.tensor, run.pipeline, run.virtual_stages) == (32, 8, 4, 3)
    assert (run.micro_batch, run.global_batch, run.micro_batches) == (2, 1792, 28)
    assert (run.recompute, run.convention, run.tflops) == ("full", "full-recompute", 140)
    two = ROWS["mbridge-206"]  # 1933 (1858): the second is another precision's
    assert (two.tflops, two.tokens_second_chip, two.convention) == (1933, 37556, "causal-halved")


def test_groups_and_selections() -> None:
    assert len(runs(group="Megatron SC21 Table 1")) == 7
    assert all(run.fully_specified for run in runs(fully_specified=True))
    with pytest.raises(ValueError, match=r"no group 'Megatron'.*Megatron SC21 Table 1"):
        runs(group="Megatron")


def test_each_row_is_predicted_or_says_why_not() -> None:
    for run in ROWS.values():
        if run.cannot:
            continue
        assert run.chip in chips()
        assert run.step_seconds() > 0
        assert run.data * run.tensor * run.pipeline * run.context == run.chips
        assert run.micro_batch * run.micro_batches * run.data == run.global_batch
    why = {
        name: ROWS[name].cannot for name in ("nemo2412-LLAMA2-13B-LoRA", "mbridge-002", "korth-layer-none")
    }
    assert why["nemo2412-LLAMA2-13B-LoRA"].startswith("LoRA")
    assert why["mbridge-002"].startswith("a mixture of experts")
    assert why["korth-layer-none"].startswith("one layer's time")
    assert "virtual stages" in ROWS["titan-14"].cannot or "micro_batch" in ROWS["titan-14"].cannot


def test_the_shapes_have_the_printed_number_of_parameters() -> None:
    checked = 0
    for run in ROWS.values():
        if run.params and not run.cannot:
            assert run.shape().parameters == pytest.approx(run.params, rel=0.06), run.id
            checked += 1
    assert checked > 200


# What each publication counts: facts from its rows that report both a rate and a throughput.
@pytest.mark.parametrize(
    ("group", "convention", "least", "most"),
    [
        ("llm-foundry MPT benchmarks", "full-attention", 0.99, 1.01),
        ("Megatron-LM Llama3 FP8", "full-attention", 0.995, 1.005),
        ("Megatron-Bridge perf summary", "causal-halved", 0.99, 1.01),
        ("tpu-recipes", "full-attention", 0.99, 1.01),
        ("NeMo 24.12 FP8", "full-attention", 0.97, 1.02),
        ("Korthikanti 2022 Table 5", "full-attention", 0.995, 1.005),
    ],
)
def test_reported_rates_are_counted_as_their_group_counts(
    group: str, convention: str, least: float, most: float
) -> None:
    other = "causal-halved" if convention == "full-attention" else "full-attention"
    ratios = _ratios(group, convention)
    assert least < median(ratios) < most
    assert abs(median(ratios) - 1) < abs(median(_ratios(group, other)) - 1)


def _ratios(group: str, convention: str) -> list[float]:
    found = []
    for run in runs(group=group):
        if run.cannot or (run.tflops is None and run.mfu is None):
            continue
        if "SFT" in run.model:  # a rate over padded rows, a throughput without them
            continue
        found.append(convention_ratio(run, convention))
    assert len(found) >= 3
    return found


def test_hand_checked_conversions() -> None:
    # Narayanan et al. 2021, equation 3, of the row with 1,008 billion parameters
    run = ROWS["sc21-1008B"]
    layers, hidden, vocab, length, batch = 128, 25600, 51200, 2048, 3072
    work = 96 * batch * length * layers * hidden**2
    work *= 1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
    assert flops_per_token(run, "full-recompute") * batch * length == pytest.approx(work, rel=1e-12)
    assert run.step_seconds() == pytest.approx(work / (3072 * 163e12), rel=1e-9)
    # BigScience prints both seconds and TFLOP/s: 8 N D agrees to the digits that are printed
    sweep = ROWS["bigsci-27"]
    assert convention_ratio(sweep, "8ND") == pytest.approx(1, rel=0.02)


def test_korthikantis_utilisations_to_a_fifth_of_a_point() -> None:
    printed = {"korth-175B-present": 51.4, "korth-530B-present": 56.0, "korth-1T-present": 56.3}
    for name, mfu in printed.items():
        run = ROWS[name]
        got = run.tokens_per_second() * flops_per_token(run, "full-attention") / (run.chips * 312e12)
        assert 100 * got == pytest.approx(mfu, abs=0.2)


Edit = Callable[[list[dict[str, str]]], None]


def _copy(tmp_path: Path, edit: Edit) -> Path:
    with shipped().open(newline="") as file:
        rows = list(csv.DictReader(file))[:3]
    edit(rows)
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("column", "text", "says"),
    [
        ("layers", "thirty", "row 'sc21-7.5B', column layers: 'thirty' is no number"),
        ("layers", "30.5", "is no whole number"),
        ("n_chips", "about 8", "column n_chips"),
        ("precision", "posit16", "no precision that is known"),
        ("recompute", "sometimes", "no way of recomputing"),
        ("fsdp_zero", "stage three", "no way of dividing states"),
        ("fully_specified", "maybe", "neither yes nor no"),
        ("id", "sc21-3.6B", "every row needs an id of its own"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_row(
    tmp_path: Path, column: str, text: str, says: str
) -> None:
    path = _copy(tmp_path, lambda rows: rows[1].update({column: text}))
    with pytest.raises(ValueError, match=says):
        runs(path=path)


def test_another_file_is_read_and_a_column_too_few_refused(tmp_path: Path) -> None:
    assert len(runs(path=_copy(tmp_path, lambda rows: None))) == 3

    def drop(rows: list[dict[str, str]]) -> None:
        for row in rows:
            del row["tp"]

    with pytest.raises(ValueError, match="no column tp"):
        runs(path=_copy(tmp_path, drop))


def test_an_unknown_way_of_counting_is_refused() -> None:
    run: PublishedRun = ROWS["sc21-76.1B"]
    with pytest.raises(ValueError, match=r"unknown convention 'mfu'.*full-attention"):
        flops_per_token(run, "mfu")
    assert "tp" in COLUMNS
