"""`fmlab train` on a disk that fills up, is read-only, or whose folder vanishes: file systems of a few MB."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.full_disk import STEPS

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
ALL = list(range(1, STEPS + 1))

pytestmark = pytest.mark.slow


def _refused(folder: Path) -> str:
    """Why no file system can be mounted here; "" when one can."""
    if not sys.platform.startswith("linux"):
        return "mount namespaces are Linux's"
    probe = subprocess.run(
        [*NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)],
        capture_output=True,
        text=True,
    )
    return "" if probe.returncode == 0 else f"no mount namespace here: {probe.stderr.strip()[-200:]}"


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("disk") / "small"
    folder.mkdir()
    if why := _refused(folder):
        pytest.skip(why)
    command = [*NAMESPACE, sys.executable, "-m", "tests.train.full_disk", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums in one order, so that ends can be compared bitwise
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout), "stderr": {"text": done.stderr}}


@pytest.mark.parametrize(
    ("case", "kept", "says"),
    [
        ("full", 3, "the disk is full: "),
        ("full, written beside", 3, "the disk is full: "),
        ("no inodes", 3, "the disk is full (no further file fits, however small): "),
        ("read-only", 2, "Read-only file system"),
    ],
)
def test_the_run_says_what_it_met_keeps_what_was_whole_and_resumes(
    came: dict[str, dict[str, Any]], case: str, kept: int, says: str
) -> None:
    found = came[case]
    assert says in found["said"]
    assert "/run/steps/" in found["said"]
    assert found["steps"] == ALL[:kept]
    assert found["latest"] == f"{kept:06d}"
    assert found["damaged"] == found["rubbish"] == found["loose"] == []
    assert found["after"]["steps"] == ALL, "with room again it goes on"
    assert found["after"]["damaged"] == found["after"]["rubbish"] == []
    assert found["same"], "and ends with bitwise the weights of a run that nothing stopped"


def test_a_folder_that_vanishes_is_made_again_and_what_was_moved_away_is_whole(
    came: dict[str, dict[str, Any]],
) -> None:
    found = came["vanished"]
    assert (found["said"], found["steps"], found["rubbish"]) == ("", ALL[2:], [])
    assert found["after"]["steps"] == ALL, "the one moved away goes on from its own last step"
    assert found["same"]


def test_a_disk_on_which_no_checkpoint_fits_is_refused_before_the_first_step(
    came: dict[str, dict[str, Any]],
) -> None:
    assert came["too small"] == {"code": 2, "left": []}
    said = came["stderr"]["text"]
    assert "fmlab: train: " in said
    assert "16.0 KiB free and " in said
    assert "Traceback" not in said
