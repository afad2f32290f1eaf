"""docs/models.md: its tables are those of the package, and its example runs as it stands."""

import re
from pathlib import Path

import model_tables
import pytest

from fmlab import models
from fmlab.models.base import Model

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "models.md").read_text()


@pytest.mark.slow
def test_the_tables_agree_with_the_package_and_leave_no_family_out() -> None:
    assert model_tables.generated(TEXT) == TEXT, "run: python scripts/model_tables.py"
    classes = [name for name in models.__all__ if isinstance(getattr(models, name), type)]
    assert {name for name in classes if issubclass(getattr(models, name), Model)} == set(
        model_tables.FAMILIES
    )


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(snippet, {})
    assert (tmp_path / "my-t5" / "model.safetensors").exists()
