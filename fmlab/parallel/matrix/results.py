"""What was found in each cell, in a file beside the page that is made of it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fmlab.parallel.matrix.cells import Cell
from fmlab.parallel.matrix.models import MODELS

KINDS = ("equal", "differs", "refused", "failed", "unrun")


@dataclass(frozen=True)
class Outcome:
    """kind: "equal" to one device, "differs", "refused", "failed" (an error that is no refusal), "unrun".

    detail: of "equal" the largest error as a part of what is allowed, of the others the reason, verbatim.
    """

    kind: str
    detail: str = ""


UNRUN = Outcome("unrun")


class Results:
    """Outcomes by cell, and which cells cover every pair. In the file each reason stands once."""

    def __init__(self, outcomes: dict[str, Outcome] | None = None, covering: Sequence[Cell] = ()) -> None:
        self.outcomes, self.covering = dict(outcomes or {}), list(covering)

    def __getitem__(self, cell: Cell) -> Outcome:
        return self.outcomes.get(cell.key, UNRUN)

    def __setitem__(self, cell: Cell, outcome: Outcome) -> None:
        self.outcomes[cell.key] = outcome

    def seems_to_run(self, cell: Cell) -> bool:
        """Whether the cell of one or two strategies equals one device; one that is unrun, whether it does so
        on the first model."""
        known = self[cell]
        if known.kind == "unrun":
            known = self[replace(cell, model=next(iter(MODELS)))]
            parts = [self[replace(cell, strategies=(name,))] for name in cell.strategies]
            return known.kind == "equal" and all(part.kind == "equal" for part in parts)
        return known.kind == "equal"

    def keep_only(self, cells: Iterable[Cell]) -> None:
        """Forget cells that are none of these."""
        legal = {cell.key for cell in cells}
        self.outcomes = {key: outcome for key, outcome in self.outcomes.items() if key in legal}

    @classmethod
    def load(cls, path: Path) -> "Results":
        """From the file, or nothing if there is none."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text())
        reasons = data["reasons"]
        outcomes = {}
        for key, value in data["cells"].items():
            kind, _, rest = value.partition(" ")
            outcomes[key] = Outcome(kind, rest if kind == "equal" else reasons[int(rest)])
        return cls(outcomes, [Cell.named(key) for key in data["covering"]])

    def save(self, path: Path) -> None:
        """Into the file, a cell a line, sorted."""
        reasons = sorted({o.detail for o in self.outcomes.values() if o.kind != "equal"})
        number = {reason: i for i, reason in enumerate(reasons)}
        cells = {
            key: f"{o.kind} {o.detail if o.kind == 'equal' else number[o.detail]}"
            for key, o in sorted(self.outcomes.items())
        }
        data = {"reasons": reasons, "covering": [cell.key for cell in self.covering], "cells": cells}
        path.write_text(json.dumps(data, indent=0, ensure_ascii=False) + "\n")
