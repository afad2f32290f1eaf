"""docs/tile-machine.md: its example runs as it stands, and what it names exists."""

import re
from pathlib import Path

import pytest
import torch

from fmlab.kernels.tiles import CORES, NeuronCore, library, run

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "tile-machine.md").read_text()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(snippet, "example", "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith("True\n")
    assert "HBM traffic   8,388,608 B read, 8,388,608 B written" in said
    assert "scalar |" in said


def test_what_it_names_exists() -> None:
    named = set(re.findall(r"\bnc\.(\w+)", TEXT))
    assert len(named) > 15
    assert not [name for name in named if not hasattr(NeuronCore, name)]


def test_the_table_of_matmuls() -> None:
    rows = re.findall(r"\| `(matmul_\w+)`(?:, `buffers=(\d)`)? \| (\d+) MiB \| (\d+) us \| (\d+) % \|", TEXT)
    assert len(rows) == 4
    operand = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")
    for kernel, buffers, traffic, time, busy in rows:
        options = {"buffers": int(buffers)} if buffers else {}
        done = run(getattr(library, kernel), operand, operand, dry=True, **options)
        said = (done.hbm_bytes / 2**20, 1e6 * done.seconds, 100 * done.utilisation["tensor"])
        assert [f"{one:.0f}" for one in said] == [traffic, time, busy]
    assert f"FLOPs alone: {1e6 * done.flops / done.core.peak():.0f} us" in TEXT


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_the_table_of_the_machine_is_that_of_the_package(name: str) -> None:
    core = CORES[name]
    assert f"128 of {core.sbuf_partition // 1024} KiB" in TEXT.replace("partitions of", "of")
    assert f"= {core.bandwidth / 1e9:.0f} GB/s" in TEXT.replace(": ", "= ")
    assert f"{core.clock('tensor') / 1e9:g} GHz: {core.peak() / 1e12:.0f}" in TEXT
