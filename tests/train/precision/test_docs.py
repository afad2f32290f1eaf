"""docs/precision.md: its tables are those of the package, and its first example runs as it stands."""

import re
from pathlib import Path

import precision_tables
import pytest

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "precision.md").read_text()


def test_the_tables_agree_with_the_package() -> None:
    assert precision_tables.generated(TEXT) == TEXT, "run: python scripts/precision_tables.py"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0], {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "bf16: 0 01111011 1001101 = 1.6015625 x 2^-4 = 0.1000976562"
    assert said[1] == "[1.0078125, 300.0, 500.0] [1.0, 288.0, 448.0]"
    assert said[2:] == ["1024.0", "2048.0"]
