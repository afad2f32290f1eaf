"""Makes the notebooks from their sources: `fmlab notebooks build [NAMES]` and `fmlab notebooks check`.

`notebooks/sources/<part>/<number>_<slug>.py` becomes two executed notebooks: `notebooks/<part>/…ipynb` with
stubs in place of the solutions, and `notebooks/solutions/<part>/…ipynb`. The same source and the same outputs
give the same bytes. In texts `[[1.9]]` becomes a link to that chapter. `check` executes nothing: it compares
the committed notebooks with their sources.
"""

import argparse
import ast
import difflib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmlab.extras import require
from fmlab.lab import navigation, percent
from fmlab.lab.curriculum import XLA_KERNEL, Curriculum, Entry, load, notebooks_folder

TAGS = {"setup", "timing", "raises-exception", "reading"}
PAIRS = {"tags", "exercise", "check", "uses"}
CELL_TIMEOUT = 180  # seconds; a dead kernel would otherwise hang the build


@dataclass(frozen=True)
class Form:
    """One notebook file: an entry of the curriculum, unsolved or solved."""

    folder: Path  # the notebooks folder
    entry: Entry
    solved: bool

    @property
    def source(self) -> Path:
        return self.folder / "sources" / self.entry.part / f"{self.entry.file}.py"

    @property
    def path(self) -> Path:
        return self.folder / ("solutions" if self.solved else "") / self.entry.path

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the notebook: its kernel, and nothing that differs from machine to machine."""
        kernel = self.entry.kernel
        spec = {"display_name": kernel.title, "language": "python", "name": kernel.name}
        return {"kernelspec": spec, "language_info": {"name": "python"}}

    @property
    def label(self) -> str:
        return self.path.relative_to(self.folder).as_posix()


def compose(form: Form, curriculum: Curriculum) -> Any:
    """Return the notebook of `form` without outputs. ValueError: file and line of a bad source."""
    v4 = require("lab", "nbformat.v4")
    cells = percent.read(form.source)
    if not cells or cells[0].kind != "markdown" or not cells[0].text(False).startswith(navigation.LEARN):
        raise ValueError(
            f"{form.source}: the first cell must be a text cell that begins {navigation.LEARN!r}"
        )
    _check_exercises(cells, form)
    top = navigation.header(curriculum, form.entry, cells[0].text(False), form.solved)
    notebook = v4.new_notebook(metadata=form.metadata)
    notebook.cells = [v4.new_markdown_cell(top, id="header")]
    for cell in cells[1:]:
        text = cell.text(form.solved).strip("\n")
        if cell.kind == "markdown":
            text = navigation.linked(text, curriculum, form.entry, form.solved)
            made = v4.new_markdown_cell(text, id=cell.id)
        else:
            made = v4.new_code_cell(text, id=cell.id)
        made.metadata.update(_cell_metadata(cell, form))
        notebook.cells.append(made)
    bottom = navigation.footer(curriculum, form.entry, form.solved)
    notebook.cells.append(v4.new_markdown_cell(bottom, id="footer"))
    return notebook


def _check_exercises(cells: Sequence[percent.PercentCell], form: Form) -> None:
    """ValueError for an exercise that has no number of this notebook's or one taken, or that is not there."""
    defined: set[str] = set()
    for cell in cells:
        where = f"{form.source}:{cell.line}"
        if "exercise" in cell.pairs:
            number = cell.pairs["exercise"]
            if not isinstance(number, str) or not re.fullmatch(
                rf"{re.escape(form.entry.number)}\.\d+", number
            ):
                raise ValueError(f'{where}: exercise {number!r}; legal is "{form.entry.number}.<number>"')
            if number in defined:
                raise ValueError(f"{where}: exercise {number} is there already; give this one another number")
            defined.add(number)
        for key in ("check", "uses"):
            if key in cell.pairs and cell.pairs[key] not in defined:
                known = ", ".join(sorted(defined)) or "none"
                raise ValueError(
                    f"{where}: no exercise {cell.pairs[key]!r} above to {key}; there are: {known}"
                )


def _cell_metadata(cell: percent.PercentCell, form: Form) -> dict[str, Any]:
    where = f"{form.source}:{cell.line}"
    if unknown := set(cell.pairs) - PAIRS:
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; legal are: {', '.join(sorted(PAIRS))}")
    if unknown := set(cell.tags) - TAGS:
        raise ValueError(f"{where}: unknown tags {', '.join(unknown)}; legal are: {', '.join(sorted(TAGS))}")
    tags = cell.tags
    if "timing" in tags:
        tags.append("nbval-ignore-output")
    marks = {key: cell.pairs[key] for key in ("exercise", "check", "uses") if key in cell.pairs}
    tags += [key for key in ("exercise", "check") if key in marks]
    if not form.solved and ("check" in marks or "uses" in marks):
        tags.append("raises-exception")  # so that Run All goes on past what is not solved yet
    return {**({"fmlab": marks} if marks else {}), **({"tags": tags} if tags else {})}


def dumps(notebook: Any) -> str:
    """The one way in which notebooks are written."""
    return require("lab", "nbformat").writes(notebook, version=4) + "\n"


def execute(notebook: Any, form: Form, timeout: float = CELL_TIMEOUT) -> Any:
    """Run all cells in a fresh kernel whose working directory is the notebook's own folder.

    Raises RuntimeError that names the source line of a cell that failed or ran longer than `timeout` seconds,
    and what to do when the kernel is not there.
    """
    nbclient = require("lab", "nbclient")
    check_kernel(form.entry)
    form.path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(
        "JUPYTER_PREFER_ENV_PATH", "1"
    )  # this environment's kernel, not one in the home folder
    client = nbclient.NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name=form.entry.kernel.name,
        resources={"metadata": {"path": str(form.path.parent)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # no warning about loopback TCP for each kernel
    )
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise RuntimeError(f"{_failed_at(notebook, form)}: this cell failed\n{error}") from None
    except nbclient.exceptions.CellTimeoutError:
        raise RuntimeError(
            f"{_failed_at(notebook, form)}: this cell took more than {timeout:.0f} s"
        ) from None
    notebook.metadata = require("lab", "nbformat").from_dict(form.metadata)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            _settle(cell, form)
    return notebook


def check_kernel(entry: Entry) -> None:
    """Raise RuntimeError with the remedy when Jupyter does not know the kernel of this notebook."""
    specs = require("lab", "jupyter_client.kernelspec")
    try:
        specs.KernelSpecManager().get_kernel_spec(entry.kernel.name)
    except specs.NoSuchKernel:
        how = "make lab-xla" if entry.kernel is XLA_KERNEL else "make setup"
        raise RuntimeError(
            f"notebook {entry.number} runs in the kernel {entry.kernel.title!r}, which is not here; "
            f"to get it: {how}"
        ) from None


def _failed_at(notebook: Any, form: Form) -> str:
    """File and line of the first cell that failed or did not finish."""
    lines = {cell.id: cell.line for cell in percent.read(form.source)}
    for cell in notebook.cells:
        if cell.cell_type == "code" and "raises-exception" not in cell.metadata.get("tags", []):
            failed = any(output.output_type == "error" for output in cell.outputs)
            if failed or cell.execution_count is None:
                return f"{form.source}:{lines[cell.id]}"
    return str(form.source)


def _settle(cell: Any, form: Form) -> None:
    """Take away what differs between two runs or two machines: tracebacks and execution times."""
    cell.metadata.pop("execution", None)
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if "raises-exception" in cell.metadata.get("tags", []) and not errors:
        raise RuntimeError(
            f"{form.label}: this cell is tagged raises-exception and raised nothing:\n{cell.source}"
        )
    for error in errors:
        if error.ename != "NotYet":  # its traceback is already two short lines
            error.traceback = [f"\x1b[31m{error.ename}\x1b[39m: {error.evalue}"]


def build(
    forms: Sequence[Form], curriculum: Curriculum, keep_outputs: bool = False, timeout: float = CELL_TIMEOUT
) -> list[Path]:
    """Make the notebooks of `forms`; return those whose bytes changed.

    With `keep_outputs` nothing is executed: outputs of the present files stay, and a code cell that changed
    since, its comments and docstrings aside, raises ValueError.
    """
    changed = []
    for form in forms:
        notebook = compose(form, curriculum)
        notebook = _with_old_outputs(notebook, form) if keep_outputs else execute(notebook, form, timeout)
        text = dumps(notebook)
        if not form.path.exists() or form.path.read_text(encoding="utf-8") != text:
            form.path.parent.mkdir(parents=True, exist_ok=True)
            draft = form.path.with_suffix(".tmp")
            draft.write_text(text, encoding="utf-8")
            draft.replace(form.path)
            changed.append(form.path)
    return changed


def _with_old_outputs(notebook: Any, form: Form) -> Any:
    if not form.path.exists():
        raise ValueError(f"{form.label} does not exist yet; build it without --keep-outputs")
    old = require("lab", "nbformat").read(form.path, as_version=4)
    before = [cell for cell in old.cells if cell.cell_type == "code"]
    after = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [_program(cell.source) for cell in before] != [_program(cell.source) for cell in after]:
        raise ValueError(f"{form.label}: its code changed; build it without --keep-outputs")
    for kept, cell in zip(before, after, strict=True):
        cell.outputs, cell.execution_count = kept.outputs, kept.execution_count
    return notebook


def _program(source: str) -> tuple[list[str], str]:
    """What a code cell does: its magics, and its syntax without comments, docstrings and line breaks."""
    lines = source.splitlines()
    magics = [line for line in lines if line.lstrip().startswith(("%", "!"))]
    try:
        tree = ast.parse("\n".join("" if line in magics else line for line in lines))
    except SyntaxError:
        return [source], ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
    return magics, ast.dump(tree)


def check(forms: Sequence[Form], curriculum: Curriculum) -> list[str]:
    """Compare committed notebooks with their sources byte for byte (outputs aside); return the problems."""
    nbformat = require("lab", "nbformat")
    problems = []
    for form in forms:
        if not form.source.exists():
            problems.append(f"{form.label}: has no source {form.source.relative_to(form.folder)}")
            continue
        if not form.path.exists():
            problems.append(f"{form.label}: missing; make it with: fmlab notebooks build {form.entry.number}")
            continue
        try:
            text = form.path.read_text(encoding="utf-8")
            stored = nbformat.reads(text, as_version=4)
            nbformat.validate(stored)
            if not stored.cells:
                raise ValueError("it has no cells")
        except Exception as error:  # nbformat raises all kinds
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(f"{form.label}: not a notebook ({reason}); build it again")
            continue
        if dumps(stored) != text:
            problems.append(f"{form.label}: written by another tool; build it again")
        for cell in stored.cells:
            if cell.cell_type == "code":
                if cell.execution_count is None:
                    problems.append(f"{form.label}: cell {cell.id} was never executed")
                cell.outputs, cell.execution_count = [], None
        problems += _differences(dumps(stored), dumps(compose(form, curriculum)), form)
    return problems


def _differences(stored: str, wanted: str, form: Form) -> list[str]:
    if stored == wanted:
        return []
    names = (form.label, form.source.relative_to(form.folder).as_posix())
    lines = difflib.unified_diff(stored.splitlines(), wanted.splitlines(), *names, lineterm="", n=1)
    return [f"{form.label}: differs from its source\n" + "\n".join(list(lines)[:30])]


def strays(folder: Path, curriculum: Curriculum) -> list[str]:
    """Notebooks and sources that the curriculum does not name as ready."""
    known = {form.path for entry in curriculum.ready for form in forms_of(folder, entry)}
    known |= {form.source for entry in curriculum.ready for form in forms_of(folder, entry)}
    known |= {path.with_suffix(".wrong.py") for path in known if path.suffix == ".py"}
    found = [path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    found += [path for path in (folder / "sources").rglob("*.py")]
    return [
        f"{path.relative_to(folder)}: not a ready notebook of curriculum.toml"
        for path in sorted(found)
        if path not in known
    ]


def forms_of(folder: Path, entry: Entry) -> list[Form]:
    return [Form(folder, entry, solved) for solved in (False, True)]


def _choose(folder: Path, curriculum: Curriculum, names: Sequence[str]) -> list[Form]:
    entries = [curriculum.find(re.sub(r".*/", "", name)) for name in names] or curriculum.ready
    if early := [entry.number for entry in entries if not entry.ready]:
        raise ValueError(
            f"{', '.join(early)}: still 'to come' in curriculum.toml; set status = \"ready\" first"
        )
    return [form for entry in entries for form in forms_of(folder, entry)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command `fmlab notebooks`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fmlab notebooks", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("action", choices=["build", "check"])
    parser.add_argument("names", nargs="*", help="numbers or file names, such as 1.3; all if none")
    parser.add_argument("--folder", type=Path, default=None, help="the notebooks folder")
    parser.add_argument("--exercises-only", action="store_true", help="do not make the solution notebooks")
    parser.add_argument(
        "--keep-outputs", action="store_true", help="only texts, comments and links changed: run nothing"
    )
    parser.add_argument(
        "--timeout", type=float, default=CELL_TIMEOUT, help="seconds a cell (default: %(default)s)"
    )
    options = parser.parse_intermixed_args(argv)
    folder = (options.folder or notebooks_folder()).resolve()
    curriculum = load(folder)
    forms = _choose(folder, curriculum, options.names)
    if options.action == "check":
        return _report_check(forms, folder, curriculum, everything=not options.names)
    if options.exercises_only:
        forms = [form for form in forms if not form.solved]
    for form in forms:
        began = time.monotonic()
        try:
            changed = build([form], curriculum, options.keep_outputs, options.timeout)
        except RuntimeError as error:
            print(f"fmlab notebooks: {error}", file=sys.stderr)
            return 1
        seconds = time.monotonic() - began
        print(f"{'wrote    ' if changed else 'unchanged'} {form.label} ({seconds:.0f} s)", flush=True)
    return 0


def _report_check(forms: Sequence[Form], folder: Path, curriculum: Curriculum, everything: bool) -> int:
    from fmlab.lab import guard

    problems = check(forms, curriculum)
    readable = [f for f in forms if f.path.exists() and not any(f"{f.label}: not a" in p for p in problems)]
    problems += [problem for form in readable for problem in guard.inspect(form.path)]
    if everything:
        problems += strays(folder, curriculum)
    for problem in problems:
        print(problem)
    print(f"{len(forms)} notebooks, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
