"""The programs of chapter 2.9 where there is no torch 2.9, and where they cannot run."""

from pathlib import Path

import pytest

from fmlab.lab import two_torches


def test_without_the_other_environment_the_committed_outcomes_are_shown_with_their_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fmlab.lab.curriculum.notebooks_folder", lambda: tmp_path / "notebooks")
    found, made = two_torches.on_torch_2_9()
    assert found == two_torches.COMMITTED
    assert made.startswith("committed, made by: python -m fmlab.lab.two_torches in .venv-xla, torch 2.9.1")
    assert list(found) == list(two_torches.PROGRAMS)


def test_an_environment_that_cannot_run_them_is_named_with_its_error(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no torch here >&2; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"python -m fmlab.lab.two_torches failed:\nno torch here"):
        two_torches.run(broken)
