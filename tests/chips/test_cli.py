"""`fmlab chips` and `fmlab bench chip`."""

import pytest

from fmlab.bench import chip as bench
from fmlab.chips import Chip, chips, cli, hosts
from fmlab.ranks import Ranks


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in [*chips(), *hosts()])


def test_a_card_shows_convention_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["show", "trn2"])
    said = capsys.readouterr().out
    assert "667 TFLOP/s, dense, per chip" in said
    assert "also 632" in said
    assert "trainium2.rst" in said
    assert "trn2.48xlarge" in said
    cli.main(["show", "p4d.24xlarge"])
    assert "21.957642 USD a host" in capsys.readouterr().out  # not rounded
    with pytest.raises(ValueError, match=r"unknown chip or host 'a100'.*did you mean 'a100-40gb'"):
        cli.main(["show", "a100"])


def test_a_comparison_leaves_out_what_nobody_gives(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["compare", "h100", "tpu-v5p", "trn2-core"])
    rows = {line[:26].strip(): line.split()[-3:] for line in capsys.readouterr().out.splitlines()}
    assert rows["peak bf16 [TFLOP/s]"] == ["989", "459", "79"]
    assert rows["measured best bf16 [TFLOP/s]"[:26]] == ["794.5", "-", "-"]
    assert rows["on the chip [MiB]"] == ["50", "-", "28"]
    with pytest.raises(ValueError, match=r"fp7.*bf16"):
        cli.main(["compare", "h100", "--dtype", "fp7"])
    with pytest.raises(ValueError, match="unknown chip"):
        cli.main(["compare", "h100", "p5.48xlarge"])


def test_the_benchmark_reports_a_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Chip.measured("here", {"fp32": 1e11, "bf16": 2e11}, 2e10, 2**33)
    monkeypatch.setattr(bench, "this_machine", lambda quick, link: here)
    monkeypatch.setattr(bench, "all_reduce_bandwidth", lambda n, repeats: n * 1e9)
    found = {result.name: result for result in bench.run(quick=True)}
    assert found["chip: ridge in fp32"].value == 5
    assert found["chip: one of 4 ranks sends"].value == 4
    assert found["chip: ridge of h100 in bf16"].kind == "quoted"


@pytest.mark.multirank
def test_what_a_rank_sends_is_measured(ranks2: Ranks) -> None:
    seconds = ranks2.run(bench._all_reduce_seconds, 2**20, 2)
    assert all(1e-6 < one < 10 for one in seconds)
