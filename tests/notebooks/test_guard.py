"""Every committed notebook equals its source and keeps the rules; and the guard sees each kind of fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from fmlab.lab import builder, guard
from fmlab.lab.curriculum import load, notebooks_folder

FOLDER = notebooks_folder()
FORMS = [form for entry in load().ready for form in builder.forms_of(FOLDER, entry)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.label)
def test_notebook_is_in_sync_and_clean(form: builder.Form) -> None:
    problems = builder.check([form], load())
    assert not problems, "\n".join(problems)
    problems = guard.inspect(form.path)
    assert not problems, "\n".join(problems)


def test_no_strays() -> None:
    assert builder.strays(FOLDER, load()) == []


HEADER = "# 1 T\n\n- **You will learn** a.\n- **You need** b.\n- **Runs on** c."


def _cell(kind: str = "code", **changes: Any) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": "x", "metadata": {}, "source": "1"}
    if kind == "code":
        output = {"output_type": "stream", "name": "stdout", "text": "1\n"}
        cell.update(execution_count=None, outputs=[output])
    return {**cell, **changes}


def _stream(text: str) -> list[dict[str, Any]]:
    return [{"output_type": "stream", "name": "stdout", "text": text}]


def _html(text: str) -> list[dict[str, Any]]:
    return [{"output_type": "display_data", "metadata": {}, "data": {"text/html": text, "text/plain": "x"}}]


def _inspect(tmp_path: Path, cell: dict[str, Any], **metadata: Any) -> str:
    cells = [_cell("markdown", id="header", source=HEADER), *(_cell(id=f"c{at}") for at in range(5)), cell]
    for number, code in enumerate([one for one in cells if one["cell_type"] == "code"], start=1):
        if code["execution_count"] is None:
            code["execution_count"] = number
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}))
    return "\n".join(guard.inspect(path))


def test_a_clean_notebook_passes(tmp_path: Path) -> None:
    assert _inspect(tmp_path, _cell()) == ""


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (_cell(execution_count=9), "execution count 9 instead of 6"),
        (
            _cell(outputs=[{"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}]),
            "error output: ValueError",
        ),
        (_cell(outputs=_stream("UsageError: Line magic `%x` not found.")), "UsageError:"),
        (_cell(outputs=_stream("sh: 1: nothing: command not found")), "command not found"),
        (_cell(outputs=_stream("<function f at 0x7f00aa11bb22>")), "memory address"),
        (_cell(outputs=_stream(f"{Path(__file__).resolve().parents[2]}/x.py")), "path of the machine"),
        (_cell(outputs=_html('<script src="https://cdn.org/x.js"></script>')), "from the network"),
        (_cell(metadata={"tags": ["raises-exception"]}), "no error is stored"),
        (_cell("markdown", source="word " * 41), "41 words; at most 40"),
        (_cell(source="a = 1\n" * 16), "16 lines of code; at most 15"),
        (_cell(source="#" * 400_000), "bytes; at most 400000"),
    ],
)
def test_each_fault_is_seen(tmp_path: Path, cell: dict[str, Any], problem: str) -> None:
    assert problem in _inspect(tmp_path, cell)


def test_widget_state_is_seen(tmp_path: Path) -> None:
    assert "stored widget state" in _inspect(tmp_path, _cell(), widgets={})


def test_too_little_compared_is_seen(tmp_path: Path) -> None:
    cells = [_cell("markdown", id="header", source="# no lines")]
    for number in range(1, 5):
        tags = {"tags": ["nbval-ignore-output"] if number > 2 else []}
        cells.append(_cell(id=f"c{number}", execution_count=number, metadata=tags))
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    problems = "\n".join(guard.inspect(path))
    assert "2 of 4 code cells are not compared; at most a quarter" in problems
    assert "only 2 cells have an output that is compared" in problems
    assert "the first three lines must be" in problems


def test_words_are_prose_only() -> None:
    text = "# A heading\nFour words [in it](http://a/b/c).\n\n| a | b |\n\n```\ncode code\n```\n$$x + y$$"
    assert guard.count_words(text) == 4
