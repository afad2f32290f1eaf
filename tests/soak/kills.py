"""Kills at random moments: nothing is lost beyond the last checkpoint, and the end is bitwise the same."""

import json
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmlab.storage import read_manifest
from fmlab.train import checkpoint
from tests.soak.cases import Case, Ranks

_LIMIT = 120.0  # seconds that a start may take


@dataclass
class Killed:
    """What happened to one case: kills, how many of them while a checkpoint was being written."""

    case: str
    kills: int = 0
    in_a_save: int = 0


def end_of(out: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The hashes of all files of the last checkpoint, and its run state without paths."""
    path = checkpoint.latest(out)
    assert not checkpoint.damage(path)
    files = {name: entry["sha256"] for name, entry in read_manifest(path).items() if name != "run.json"}
    state = json.loads((path / "run.json").read_text())
    del state["settings"]
    return files, state


def straight(case: Case, folder: Path) -> float:
    """The run that nobody kills; the seconds it took."""
    start = time.monotonic()
    ranks = Ranks(case, folder / "straight")
    assert ranks.wait(_LIMIT), f"{case.name}: {ranks.said}"
    return time.monotonic() - start


def kill(case: Case, folder: Path, number: int, draw: random.Random) -> Killed:
    """Start the case and kill it, `number` times; then let it end, and compare with the straight run.

    Raises AssertionError that says what was lost or what differs.
    """
    seconds, out, done = straight(case, folder), folder / "killed", Killed(case.name)
    while done.kills < number:
        if out.exists() and checkpoint.steps(out)[-1:] == [case.config(out).steps]:
            shutil.rmtree(out)  # it ended before the kill: once more
            (folder / "killed.starts").unlink(missing_ok=True)
        there = checkpoint.steps(out)
        resume = bool(there)
        expected = int(checkpoint.latest(out).name) if resume else 0
        ranks = Ranks(case, out, resume=resume, async_save=bool(done.kills % 2))
        ended = ranks.wait(draw.uniform(0.1, 1.0) * seconds)
        assert ended is not False, f"{case.name}: {ranks.said}"
        if ended is None:
            ranks.kill(draw.randrange(case.ranks), draw.choice([0.0, 0.05]))
            done.kills += 1
            done.in_a_save += any((out / "steps").glob(".*.incomplete"))
        _check_start(folder / "killed.starts", expected, case)
    if checkpoint.steps(out)[-1:] != [case.config(out).steps]:
        ranks = Ranks(case, out, resume=bool(checkpoint.steps(out)))
        assert ranks.wait(_LIMIT), f"{case.name}: {ranks.said}"
    same_end(case, out, folder / "straight")
    return done


def same_end(case: Case, out: Path, straight: Path) -> None:
    """Raise AssertionError unless both runs ended with the same bits and the same history."""
    ours, theirs = end_of(out), end_of(straight)
    assert ours[0] == theirs[0], f"{case.name}: other bits in {_differing(ours[0], theirs[0])}"
    assert ours[1] == theirs[1], f"{case.name}: another history in {_differing(ours[1], theirs[1])}"


def _check_start(file: Path, expected: int, case: Case) -> None:
    """The start went on from the newest checkpoint that was complete before it, if it came so far."""
    starts = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    assert starts in ([], [str(expected)]), f"{case.name}: began at {starts}, the checkpoint was {expected}"


def _differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
