"""`python -m fmlab.parallel.matrix`: run cells and write docs/parity.md and docs/parity.json.

What is in the file already is kept unless --fresh is given, so that a run may be stopped and taken up again.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from fmlab.parallel.matrix.cells import Cell, all_cells, covering_cells
from fmlab.parallel.matrix.page import outcome_text, page
from fmlab.parallel.matrix.results import Outcome, Results
from fmlab.parallel.matrix.run import Pools, refusal, run_cell

_SAVE_EVERY = 30.0  # seconds


@dataclass
class Matrix:
    """Run every cell of the parity matrix and write its page."""

    docs: Path = Path("docs")
    """Folder of parity.md and parity.json."""
    fresh: bool = False
    """Forget what was found before."""
    only: str = ""
    """Run only cells whose name contains this, such as "fp64/gpt" or "torch/"."""
    again: str = ""
    """Run cells again whose name contains this, though they have an outcome."""
    minutes: float = 0.0
    """Stop after that long; 0 for no limit. What was not reached is printed as unrun."""
    part: Literal["all", "cells", "covering"] = "all"
    """Every cell, or those alone that cover every pair and that tests run again."""
    cover: bool = False
    """Choose all of them anew; otherwise cells are added for pairs that none has."""
    page_only: bool = False
    """Run nothing."""


def main(argv: list[str] | None = None) -> int:
    """Ends with 1 when a cell differs or fails."""
    options = tyro.cli(Matrix, args=argv, prog="python -m fmlab.parallel.matrix")
    file = options.docs / "parity.json"
    results = Results() if options.fresh else Results.load(file)
    covering = [] if options.fresh else results.covering
    began = saved = time.monotonic()
    with Pools() as pools:
        for stage in ("cells", "covering") if options.part == "all" else (options.part,):
            if stage == "covering" and not options.page_only:
                begin = (
                    [] if options.cover else [c for c in covering if results[c].kind in ("equal", "unrun")]
                )
                covering = covering_cells(results.seems_to_run, chosen=begin)
                results.covering = covering
            for cell in all_cells() if stage == "cells" else covering:
                if options.only not in cell.key:
                    continue
                if reason := refusal(cell):  # costs nothing, so always said anew
                    results[cell] = Outcome("refused", reason)
                    continue
                late = options.minutes and time.monotonic() - began > 60 * options.minutes
                if options.page_only or late or not _wanted(cell, options, results):
                    continue
                results[cell] = run_cell(cell, pools.of(cell.ranks) if cell.ranks else None)
                if results[cell].kind != "equal":
                    print(f"{cell.key}: {outcome_text(results[cell])[:300]}", flush=True)
                if time.monotonic() - saved > _SAVE_EVERY:
                    results.save(file)
                    saved = time.monotonic()
    results.keep_only([*all_cells(), *covering])
    results.save(file)
    (options.docs / "parity.md").write_text(page(results, covering))
    wrong = [key for key, outcome in results.outcomes.items() if outcome.kind in ("differs", "failed")]
    page_file = options.docs / "parity.md"
    print(f"{len(results.outcomes)} cells have an outcome, {len(wrong)} are wrong; see {page_file}")
    return int(bool(wrong))


def _wanted(cell: Cell, options: Matrix, results: Results) -> bool:
    again = bool(options.again) and options.again in cell.key
    return again or results[cell].kind in ("unrun", "failed", "differs")


if __name__ == "__main__":
    raise SystemExit(main())
