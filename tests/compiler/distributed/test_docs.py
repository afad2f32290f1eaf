"""docs/compiler.md: the examples on distributed graphs run as they stand."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "compiler.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    section = TEXT.split("## Distributed graphs")[1].split("\n## ")[0]
    first, second = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, object] = {}
    exec(first, names)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("gradient sums: 16x sum")
    exposed = [line.rpartition("of which ")[2] for line in said if line.startswith("modelled")]
    assert len(exposed) == 3
    assert len(set(exposed)) == 3
    assert said[-2].startswith("compute ")
    exec(second, names)
    assert "divided" in names
