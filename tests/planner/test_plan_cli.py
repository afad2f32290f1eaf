"""`fmlab plan` from the shell."""

import re

import pytest

from fmlab.cli import main as fmlab
from fmlab.planner.cli import lengths, main

LLAMA = "llama3.1-70b --chip h100 --chips 64 --tensor 8 --micro-batches 4 --seq-len 8192 --global-batch 128"


def test_a_plan_is_printed_and_says_by_its_status_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{LLAMA} --zero 1 --recompute full".split()) == 1
    text = capsys.readouterr().out
    assert "does NOT fit 80.00 GiB" in text
    assert "it would fit with" in text
    assert "sequence_parallel=True: " in text
    assert main(f"{LLAMA} --zero 1 --recompute full --sequence-parallel".split()) == 0
    text = capsys.readouterr().out
    assert "fits 80.00 GiB" in text
    assert "Layout(data=8" in text  # what the chips left


def test_several_streams_and_a_calibration_of_your_own(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[calibration]\nstep = 100.0\n")
    command = f"t5-base --chip tpu-v5e --seq-len input=512,output=114 --calibration {path} --global-batch 8"
    assert main(command.split()) == 0
    assert "rows of 512 input, 114 output" in (text := capsys.readouterr().out)
    assert re.search(r"step +100\.000 s", text)
    assert lengths("input=5, output=7") == {"input": 5, "output": 7}


def test_a_search_prints_the_best_few_and_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    command = "llama3.1-8b --chip h100 --chips 16 --global-batch 32 --seq-len 4096 --search --keep 3"
    assert main(f"{command} --tensor 2 --why --tokens 1e9".split()) == 0
    text = capsys.readouterr().out
    assert "layouts looked at, best by time: modelled" in text
    rows = re.findall(r"^ +[\d.]+ m?s +[\d.]+% .*$", text, re.MULTILINE)
    assert len(rows) == 3
    assert "against " in text
    assert "days on 16 chips" in text
    assert "tensor=2" in text
    command = "llama3.1-70b --chip h100 --chips 2 --global-batch 2 --seq-len 64 --search"
    assert main(command.split()) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("gpt3-175 --chip h100 --seq-len 8", "Did you mean 'gpt3-175b'?"),
        ("gpt2 --seq-len 8", "give chip="),
        ("gpt2 --chip h1000 --seq-len 8", "unknown chip"),
        ("gpt2 --chip h100", "say how many tokens"),
        ("gpt2 --chip h100 --seq-len many", "for several streams"),
        ("gpt2 --chip h100 --seq-len 8 --tensor 5", "legal are [1, 2, 3, 4, 6, 12]"),
        ("gpt2 --chip h100 --seq-len 8 --chips 12 --tensor 8", "needs 8 ranks"),
        ("gpt2 --chip h100 --seq-len 8 --data 4 --global-batch 6", "cannot be cut"),
        ("gpt2 --chip h100 --seq-len 8 --search", "--search needs --chips"),
        ("gpt2 --chip h100 --seq-len 8 --why", "give --search"),
        ("gpt2 --chip h100 --seq-len 8 --calibration nowhere.toml", "nowhere.toml"),
    ],
)
def test_errors_are_one_line(command: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fmlab(["plan", *command.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
