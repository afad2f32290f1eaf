"""`fmlab export FOLDER`: a clean copy of the notebooks in a folder of the learner's own."""

import argparse
import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fmlab.extras import require
from fmlab.lab.curriculum import Curriculum, load, notebooks_folder
from fmlab.storage import check_writable, write_atomic

LEDGER = (
    ".fmlab-export.json"  # what we wrote, so that a learner's changes are known from our own older copies
)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def export(
    folder: Path,
    solutions: bool = False,
    only: Sequence[str] = (),
    outputs: bool = True,
    force: bool = False,
    notebooks: Path | None = None,
    keep: bool = False,
) -> list[Path]:
    """Copy the notebooks to `folder`; return the files that are new or were updated.

    `only` names some of them, such as "1.3"; without `outputs` the copies are empty. Links to what is not
    copied become plain text. A file that was changed since we wrote it is not touched unless `force`: with
    `keep` it is left as it is, without both the whole export is refused.

    ValueError for an unknown notebook, a folder among the originals, or changed files (then nothing is
    written); StorageError for a folder that cannot be written.
    """
    origin = (notebooks or notebooks_folder()).resolve()
    target = Path(os.path.realpath(Path(folder).expanduser()))  # Path.resolve raises for links in a circle
    if target == origin or origin in target.parents:
        raise ValueError(f"{target} is the folder of the originals; choose a folder of your own")
    wanted = _choose(load(origin), origin, solutions, only)
    linked = {*wanted, *_present(target)}
    copies = {place: _copy(origin / place, place, linked, outputs) for place in wanted}
    check_writable(target)
    ledger = _read_ledger(target)
    changed = [
        place for place, text in copies.items() if _is_changed(target / place, text, ledger.get(str(place)))
    ]
    if keep:
        copies = {place: text for place, text in copies.items() if place not in changed}
    elif changed and not force:
        names = "\n".join(f"  {place}" for place in changed)
        raise ValueError(
            f"these files in {target} were changed and would be lost:\n{names}\n"
            "Nothing was written. Choose another folder, or add --force to replace them."
        )
    written = []
    for place, text in copies.items():
        file = target / place
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text.encode())
            written.append(file)
        ledger[str(place)] = _digest(text)
    write_atomic(target / LEDGER, json.dumps(ledger, indent=1, sort_keys=True).encode())
    return written


def _choose(curriculum: Curriculum, origin: Path, solutions: bool, only: Sequence[str]) -> list[Path]:
    entries = [curriculum.find(name) for name in only] or curriculum.ready
    if early := [entry.number for entry in entries if not entry.ready]:
        ready = ", ".join(entry.number for entry in curriculum.ready)
        raise ValueError(f"{', '.join(early)}: still to come; ready are: {ready}")
    places = [entry.path for entry in entries]
    if solutions:
        places += [Path("solutions") / entry.path for entry in entries]
    if missing := [str(place) for place in places if not (origin / place).exists()]:
        raise ValueError(f"not built yet: {', '.join(missing)}; build them with: fmlab notebooks build")
    return places


def _present(target: Path) -> list[Path]:
    """Notebooks that an earlier export put there: links to them work."""
    return [Path(place) for place in _read_ledger(target) if (target / place).exists()]


def _copy(file: Path, place: Path, linked: set[Path], outputs: bool) -> str:
    nbformat = require("lab", "nbformat")
    notebook = nbformat.read(file, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _relink(cell.source, place, linked)
        elif not outputs:
            cell.outputs, cell.execution_count = [], None
    return str(nbformat.writes(notebook, version=4)) + "\n"


def _relink(text: str, place: Path, linked: set[Path]) -> str:
    """Keep links to the web, to headings and to files that stand there too; others become their text."""

    def keep(found: re.Match[str]) -> str:
        address = found[2].partition("#")[0]
        if not address or re.match(r"[a-z]+:", address):
            return found[0]
        goal = Path(os.path.normpath(place.parent / address))
        return found[0] if goal in linked else found[1]

    return LINK.sub(keep, text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_ledger(target: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((target / LEDGER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):  # whatever it is, no word of ours
        return {}


def _is_changed(file: Path, text: str, written: str | None) -> bool:
    """True when `file` holds something that is neither the new text nor what we wrote before."""
    if not file.exists():
        return False
    present = file.read_text(encoding="utf-8", errors="replace")
    return present != text and _digest(present) != written


def main(argv: Sequence[str] | None = None) -> int:
    """The command `fmlab export`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fmlab export", description="Copy the notebooks, clean, into a folder of yours."
    )
    parser.add_argument("folder", type=Path, help="where to; made if it does not exist")
    parser.add_argument("--solutions", action="store_true", help="copy the solution notebooks too")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NUMBER", help="some notebooks only, such as 1.3"
    )
    parser.add_argument("--no-outputs", action="store_true", help="copy without outputs")
    parser.add_argument("--force", action="store_true", help="replace files that you changed")
    options = parser.parse_args(argv)
    written = export(options.folder, options.solutions, options.only, not options.no_outputs, options.force)
    for file in written:
        print(f"wrote {file}")
    print(f"{len(written)} written; open them with: fmlab lab {shlex.quote(str(options.folder))}")
    return 0
