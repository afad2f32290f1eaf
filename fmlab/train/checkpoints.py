"""`fmlab checkpoints FOLDER`: what a run has saved, and whether each of it is whole."""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fmlab.parallel import Layout
from fmlab.storage import StorageError, readable
from fmlab.train import checkpoint
from fmlab.train.elastic import starts


@dataclass(frozen=True)
class Found:
    """One checkpoint on disk.

    step:   by its name; bytes: of its files; shared: of those, in files that another checkpoint links to as
    well layout: who wrote it: layout and engine, or "unknown"
    damage: what is wrong, by file; "" for a whole one
    """

    step: int
    bytes: int
    shared: int
    layout: str
    damage: str

    def __str__(self) -> str:
        size = readable(self.bytes) + (f" ({readable(self.shared)} linked)" if self.shared else "")
        return f"step {self.step:6d}  {size:>24}  {self.layout}  {self.damage or 'whole'}"


def find(out: str | Path) -> list[Found]:
    """All checkpoints of a run, oldest first; every byte of them is read and compared with its checksum.

    Raises ValueError when there is none.
    """
    checkpoint.latest(out)  # raises
    found = []
    for step in checkpoint.steps(out):
        path = checkpoint.folder_of(out, step)
        files = [file.stat() for file in path.iterdir() if file.is_file()]
        size, shared = (sum(f.st_size for f in files if f.st_nlink >= links) for links in (1, 2))
        found.append(Found(step, size, shared, _layout(path), checkpoint.damage(path)))
    return found


def _layout(path: Path) -> str:
    try:
        settings = checkpoint.run_state(path).settings
    except (StorageError, ValueError):
        return "unknown"
    layout = settings.get("layout", {})
    plain: Mapping[str, Any] = {each.name: each.default for each in fields(Layout)}
    degrees = [f"{name}={value}" for name, value in layout.items() if value != _listed(plain.get(name))]
    return f"{settings.get('engine', '?')}, {' '.join(degrees) or 'one device'}"


def _listed(value: Any) -> Any:
    """As it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value


def recoveries(out: str | Path) -> str:
    """How often a run was broken off and went on, and what that took; "" for one that never was."""
    found = starts(out)
    took = [start.recovery for start in found if start.recovery is not None]
    if not took:
        return ""
    times = "once" if len(took) == 1 else f"{len(took)} times"
    return (
        f"broken off {times}: recovered in {statistics.median(one.seconds for one in took):.1f} s (median), "
        f"{sum(one.again for one in took)} steps done again; ranks of each start: "
        f"{', '.join(str(start.ranks) for start in found)}"
    )


def main(argv: list[str]) -> int:
    """0 if all checkpoints are whole, 1 if one is damaged. Raises ValueError for a folder without any."""
    parser = argparse.ArgumentParser(
        prog="fmlab checkpoints",
        description="List a run's checkpoints and verify every file of them; * is where --resume goes on.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="of the run: what --out was")
    args = parser.parse_args(argv)
    found = find(args.folder)
    last = int(checkpoint.latest(args.folder).name)
    best = max((one.step for one in found if not one.damage and one.step <= last), default=None)
    for one in found:
        print(f"{'*' if one.step == best else ' '} {one}")
    damaged = sum(bool(one.damage) for one in found)
    print(
        f"{len(found) - damaged} whole, {damaged} damaged; "
        + (f"--resume goes on from step {best}" if best is not None else "there is none to go on from")
    )
    if said := recoveries(args.folder):
        print(said)
    return 1 if damaged else 0
