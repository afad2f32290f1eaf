"""docs/data.md: its tables are those of the package, and its example runs as it stands."""

import re
from pathlib import Path

import data_tables
import torch

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "data.md").read_text()


def test_the_tables_agree_with_the_package():
    assert data_tables.generated(TEXT) == TEXT, "run: python scripts/data_tables.py"


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("fmlab.data.cache.cache_directory", lambda: tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(snippet, names)
    loss = names["loss"]
    assert abs(loss.item() - torch.log(torch.tensor(2000.0))) < 0.3  # as uncertain as a uniform guess
