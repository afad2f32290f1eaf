"""What every committed notebook must be, beside equal to its source: run, clean, small, readable, tested."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from fmlab.extras import require

MAX_BYTES = 400_000
MAX_WORDS = 40  # of a text cell; a list of readings may have more
MAX_READING_WORDS = 110
MAX_LINES = 15  # of a code cell, without blank lines; an exercise states its contract and may have more
MAX_EXERCISE_LINES = 25
MAX_IGNORED = 0.25  # of the code cells
MIN_COMPARED = 5  # cells with an output that is compared
MISHAPS = ("UsageError:", "command not found", "cannot be displayed")
LINES = ("- **You will learn**", "- **You need**", "- **Runs on**")
WEB = re.compile(r"""(?:src|href)\s*=\s*["']?(https?:)?//""")
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")


def inspect(path: Path) -> list[str]:
    """Return the problems of the notebook at `path`, each with its name and cell; nothing is executed."""
    notebook = require("lab", "nbformat").read(path, as_version=4)
    problems = [f"cell {cell.id}: {problem}" for cell in notebook.cells for problem in _rhythm(cell)]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        if cell.execution_count != number:
            problems.append(f"cell {cell.id}: execution count {cell.execution_count} instead of {number}")
        problems += [f"cell {cell.id}: {problem}" for problem in _outputs(cell)]
    problems += _whole(path, notebook, code)
    name = "/".join(path.parts[-3:] if "solutions" in path.parts else path.parts[-2:])
    return [f"{name}: {problem}" for problem in problems]


def _whole(path: Path, notebook: Any, code: list[Any]) -> list[str]:
    problems = []
    if "widgets" in notebook.metadata:
        problems.append("stored widget state; build it again")
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"{path.stat().st_size} bytes; at most {MAX_BYTES}")
    lines = [line for line in notebook.cells[0].source.splitlines() if line][1:4]
    if [line.startswith(start) for line, start in zip(lines, LINES, strict=False)] != [True] * 3:
        problems.append("the first three lines must be: you will learn, you need, runs on")
    ignored = [cell for cell in code if {"nbval-ignore-output", "nbval-skip"} & set(_tags(cell))]
    compared = [cell for cell in code if cell.outputs and cell not in ignored]
    if len(ignored) > MAX_IGNORED * len(code):
        problems.append(f"{len(ignored)} of {len(code)} code cells are not compared; at most a quarter")
    if len(compared) < MIN_COMPARED:
        problems.append(
            f"only {len(compared)} cells have an output that is compared; at least {MIN_COMPARED}"
        )
    return problems


def _tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _rhythm(cell: Any) -> list[str]:
    if cell.cell_type == "code":
        most = MAX_EXERCISE_LINES if "exercise" in _tags(cell) else MAX_LINES
        lines = len([line for line in cell.source.splitlines() if line.strip()])
        return [f"{lines} lines of code; at most {most}"] if lines > most else []
    if cell.id in ("header", "footer"):
        return []
    most = MAX_READING_WORDS if "reading" in _tags(cell) else MAX_WORDS
    words = count_words(cell.source)
    return [f"{words} words; at most {most}"] if words > most else []


def count_words(markdown: str) -> int:
    """Words of prose: headings, tables, code, formulas and addresses of links do not count."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", " ", markdown, flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("#", "|")))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]*`|\$[^$]*\$", " x ", text)
    return len(re.findall(r"\w[\w'.,%/+-]*", text))


def _outputs(cell: Any) -> list[str]:
    problems = []
    if "raises-exception" in _tags(cell) and not any(
        output.output_type == "error" for output in cell.outputs
    ):
        problems.append("tagged raises-exception, but no error is stored")
    for output in cell.outputs:
        if output.output_type == "error" and "raises-exception" not in _tags(cell):
            problems.append(f"error output: {output.ename}")
        text = _text(output)
        problems += [f"output says {mishap!r}" for mishap in MISHAPS if mishap in text]
        if ADDRESS.search(text):
            problems.append("output holds a memory address")
        if found := [place for place in _machine_places() if place in text]:
            problems.append(f"output holds a path of the machine that built it: {found[0]}")
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            problems.append("a widget view; it is blank for a reader: give the object a static view")
        if WEB.search(str(output.get("data", {}).get("text/html", ""))):
            problems.append("the page loads something from the network")
    return problems


def _text(output: Any) -> str:
    """All the text of an output, pictures aside."""
    data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
    return str(output.get("text", "")) + str(output.get("evalue", "")) + json.dumps(data)


def _machine_places() -> list[str]:
    package = Path(__file__).resolve().parents[2]
    return [f"{package}/", f"{Path.home()}/", f"{tempfile.gettempdir()}/", "site-packages/"]
