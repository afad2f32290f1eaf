"""Reads py:percent files: Python files cut into notebook cells by `# %%` lines.

    # %% [markdown]
    # Text cells are comments.

    # %% tags=["setup"]
    import torch
    # %load_ext fmlab.lab

A mark may carry `key=value` pairs whose values are JSON. Magics are written as comments (`# %load_ext …`,
`# %%ranks 4`, `# !ls`), so that a source stays plain Python for editors and linters; the notebook gets them
without the comment sign. The mark of a cell is `# %%` followed by a space or the end of the line, so that a
cell magic is never taken for one.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = re.compile(r"# %%(?:\s+(.*))?$")
PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\[[^\]]*\]|true|false|-?\d+(?:\.\d+)?)\s*')
MAGIC = re.compile(r"^([ \t]*)# (%{1,2}[A-Za-z]|!)", re.MULTILINE)
SOLUTION = re.compile(
    r"^([ \t]*)# BEGIN SOLUTION\n(.*?)^[ \t]*# END SOLUTION[ \t]*\n?", re.DOTALL | re.MULTILINE
)
STUB = 'raise NotImplementedError("your code here")'


@dataclass
class PercentCell:
    """One cell of a source: its kind, raw text, the pairs of its mark, and where it stands."""

    kind: str  # "markdown" or "code"
    raw: str
    line: int  # of the mark, from 1
    pairs: dict[str, Any] = field(default_factory=dict)
    id: str = ""

    @property
    def tags(self) -> list[str]:
        return list(self.pairs.get("tags", []))

    def text(self, solved: bool) -> str:
        """What the notebook shows: comments and solution marks taken away, the solution kept or replaced."""
        if self.kind == "markdown":
            return "\n".join(
                line[2:] if line.startswith("# ") else line[1:] for line in self.raw.splitlines()
            )
        return MAGIC.sub(r"\1\2", self.code(solved))

    def code(self, solved: bool) -> str:
        """The cell as plain Python (magics still comments), with its solution or with a stub in its place."""
        if solved:
            return SOLUTION.sub(r"\2", self.raw).rstrip("\n")
        return SOLUTION.sub(lambda found: f"{found[1]}{STUB}\n", self.raw).rstrip("\n")


def read(path: Path) -> list[PercentCell]:
    """Return the cells of the py:percent file `path`; ids come from each cell's own text, so they are stable.

    Raises ValueError with file and line for a mark that is not understood, text before the first mark, or
    a text cell with a line that is not a comment.
    """
    cells: list[PercentCell] = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        mark = MARK.match(line)
        if mark:
            cells.append(_open_cell(mark[1] or "", f"{path}:{number}", number))
        elif cells:
            cells[-1].raw += line + "\n"
        elif line.strip() and not line.startswith("#"):
            raise ValueError(f"{path}:{number}: code before the first cell; begin the file with '# %%'")
    seen: dict[str, int] = {}
    for cell in cells:
        cell.raw = cell.raw.strip("\n") + "\n"
        _check_marks(cell, path)
        digest = hashlib.sha256((cell.kind + cell.raw).encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, -1) + 1
        cell.id = f"{digest}-{seen[digest]}" if seen[digest] else digest
    return [cell for cell in cells if cell.raw.strip()]


def _open_cell(mark: str, where: str, line: int) -> PercentCell:
    kind = "code"
    if mark.startswith("[markdown]"):
        kind, mark = "markdown", mark.removeprefix("[markdown]").strip()
    pairs: dict[str, Any] = {}
    position = 0
    for found in PAIR.finditer(mark):
        if found.start() != position:
            break
        try:
            pairs[found[1]] = json.loads(found[2])
        except json.JSONDecodeError:
            break
        position = found.end()
    if position != len(mark):
        raise ValueError(
            f"{where}: cannot read {mark[position:]!r} in the cell mark; "
            f'legal is: # %% [markdown], or # %% key=value … with JSON values, as in tags=["setup"]'
        )
    return PercentCell(kind, "", line, pairs)


def _check_marks(cell: PercentCell, path: Path) -> None:
    if cell.kind == "markdown":
        for offset, line in enumerate(cell.raw.splitlines(), start=1):
            if line and not line.startswith("#"):
                raise ValueError(f"{path}:{cell.line + offset}: every line of a text cell begins with '# '")
    begins, ends = cell.raw.count("# BEGIN SOLUTION"), cell.raw.count("# END SOLUTION")
    if begins != ends or len(SOLUTION.findall(cell.raw)) != begins:
        raise ValueError(f"{path}:{cell.line}: '# BEGIN SOLUTION' and '# END SOLUTION' do not pair up")
