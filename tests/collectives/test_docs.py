"""docs/collectives.md: its tables are those of the package, and its example runs as it stands."""

import re
from pathlib import Path

import collective_tables
import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "collectives.md").read_text()


def test_the_tables_agree_with_the_package() -> None:
    assert collective_tables.generated(TEXT) == TEXT, "run: python scripts/collective_tables.py"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(snippet, {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "{(0, 1): 6000000, (1, 2): 6000000, (2, 3): 6000000, (3, 0): 6000000}"
    assert said[1].split()[0] == "torus"
    assert float(said[3]) == pytest.approx(745_000, rel=0.01)
