"""docs/planner.md: its example runs as it stands, its commands parse, and what it names exists."""

import re
from pathlib import Path

import pytest

from fmlab.planner import memory, time
from fmlab.planner.cli import main
from fmlab.planner.flops import CONVENTIONS
from fmlab.planner.setup import STATES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(snippet, names)
    assert "moments: parameters on the rank x 8" in capsys.readouterr().out


def test_the_first_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    command, *_ = re.findall(r"`fmlab plan (.*?)`", TEXT, re.DOTALL)
    assert main(command.split()) == 1  # it does not fit, as the page says it may
    assert "it would fit with" in capsys.readouterr().out


def test_conventions_states_and_lines_are_all_there() -> None:
    assert set(re.findall(r"^\| `([\w+-]+)` \|", TEXT, re.MULTILINE)) == set(CONVENTIONS)
    assert all(f'"{name}"' in TEXT for name in STATES)
    named = TEXT.split("## Memory")[1].split("## A second opinion")[0]
    for line in (*memory.FORMULAS, *time.FORMULAS):
        word = line.removesuffix(" messages") if "messages" in line else line
        assert word in named, line
