"""`RankError`: what happened to each rank of a call that failed, told once and briefly."""

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Frame:
    """One line of a rank's stack."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        text = self.text or source_line(self.file, self.line)
        if self.file.startswith("<%%ranks"):
            place = f"%%ranks cell, line {self.line}"
        elif _is_notebooks(self.file):
            place = f"notebook cell, line {self.line}"
        elif self.file.startswith("<"):
            place = f"{self.file.strip('<>')}, line {self.line}"
        else:
            near = os.path.relpath(self.file)
            place = f"{self.file if near.startswith('..') else near}:{self.line}"
        return f"{place}, in {self.function}" + (f": {text}" if text else "")


def source_line(file: str, line: int) -> str:
    """A line of source; "" where the cache of sources cannot say it: a library may leave an entry without
    lines there, and another thread may be making one."""
    try:
        return linecache.getline(file, line).strip()
    except Exception:
        return ""


def _is_notebooks(file: str) -> bool:
    """Whether a file name stands for a cell of the notebook that runs here.

    Cells are not told apart: their numbers depend on the order in which they were run.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and shell.compile.format_code_name(file) is not None


@dataclass
class Outcome:
    """What one rank did in a call.

    kind: "ok" (returned), "raised", "interrupted", "died", "stuck" (had to be ended).
    """

    rank: int
    kind: str
    error: str = ""  # "ValueError: not enough rows"
    where: str = ""  # the collective or function it was in, "all_reduce #3 float32[4]"
    frames: list[Frame] = field(default_factory=list)
    value: Any = None
    log: Any = None

    @property
    def line(self) -> str:
        """The last line of the user's own code it was in, or ""."""
        return str(self.frames[-1]) if self.frames else ""


class RankError(RuntimeError):
    """A call failed on one or more ranks.

    Attributes: rank (the first rank to blame), call (the collective or function it was in), error (the
    remote error, "ValueError: …", or what happened instead), outcomes (an `Outcome` per rank), restarted
    (whether the ranks had to be started anew, which empties their namespaces), advice (what to do, "" for
    nothing to say).
    """

    def __init__(
        self, rank: int, call: str, error: str, outcomes: Sequence[Outcome], headline: str = ""
    ) -> None:
        self.rank = rank
        self.call = call
        self.error = error
        self.outcomes = list(outcomes)
        self.restarted = False
        self.advice = ""
        self.headline = headline
        super().__init__(rank, call, error)

    def __reduce__(self) -> Any:
        return (RankError, (self.rank, self.call, self.error, self.outcomes, self.headline))

    def __str__(self) -> str:
        return "\n".join(self.report())

    def report(self) -> list[str]:
        """The message, line by line: who failed, where, and what the other ranks were doing."""
        culprits = [o for o in self.outcomes if o.kind in ("raised", "interrupted") and o.error == self.error]
        first = next((o for o in self.outcomes if o.rank == self.rank), None)
        who = name_ranks([o.rank for o in culprits], len(self.outcomes)) if culprits else f"rank {self.rank}"
        lines = [self.headline or f"{who}: {self.error}"]
        if first is not None and not self.headline:
            if first.where:
                lines.append(f"  in {first.where}")
            lines += [f"  at {frame}" for frame in first.frames]
        told = {o.rank for o in culprits} | ({self.rank} if not self.headline else set())
        for outcomes in group_by(
            [o for o in self.outcomes if o.rank not in told], lambda o: (o.kind, o.error, o.where, o.line)
        ):
            one = outcomes[0]
            text = f"  {name_ranks([o.rank for o in outcomes])}: {_KINDS.get(one.kind, one.kind)}"
            text += f" {one.error}" if one.error and one.kind in ("raised", "died") else ""
            text += f" in {one.where}" if one.where else ""
            text += f", at {one.line}" if one.line else ""
            lines.append(text)
        if self.restarted:
            lines.append("  The ranks were restarted: names assigned on them are gone.")
        if self.advice:
            lines.append(f"  {self.advice}")
        return lines

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines instead of the frames of the pool."""
        return [f"RankError: {self.report()[0]}", *self.report()[1:]]


class Interrupted(KeyboardInterrupt):
    """The user interrupted a call: where the ranks were, in the notebook's words."""

    def __init__(self, error: RankError | None) -> None:
        self.error = error
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        if self.error is None:
            return ["the call had just ended on all ranks"]
        return ["stopped on the ranks", *self.error.report()[1:]]

    def _render_traceback_(self) -> list[str]:
        first, *rest = self._lines()
        return [f"KeyboardInterrupt: {first}", *rest]


_KINDS = {
    "ok": "returned",
    "raised": "raised",
    "died": "died:",
    "stuck": "still",
    "interrupted": "stopped",
}


def group_by(items: Sequence[Any], key: Any) -> list[list[Any]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def name_ranks(ranks: Sequence[int], total: int | None = None) -> str:
    """`[0, 1, 2]` → "ranks 0-2"; "all 4 ranks" when it is everyone."""
    ranks = sorted(ranks)
    if total is not None and len(ranks) == total and total > 1:
        return f"all {total} ranks"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(names)
