"""docs/chips.md: its tables are those of the package, and its example runs as it stands."""

import re
from pathlib import Path

import chip_tables
import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "chips.md").read_text()


def test_the_tables_agree_with_the_package() -> None:
    assert chip_tables.generated(TEXT) == TEXT, "run: python scripts/chip_tables.py"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(snippet, {})
    said = capsys.readouterr().out
    assert "989000000000000.0 794500000000000.0" in said
    assert said.splitlines()[3].endswith("compute")  # 333 FLOPs a byte are above the ridge


def test_no_unit_needs_a_calculator() -> None:
    assert not re.search(r"e\+\d+ B/s", TEXT), "networks are in Gbit/s"
    assert "820 GiB/s (0.880 TB/s)" in TEXT, "as published, and decimal beside it"
