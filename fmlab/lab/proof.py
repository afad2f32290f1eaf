"""Proves the exercises of a source: the stub fails, each wrong answer earns its hint, the solution passes.

No notebook is executed. For exercise 1.3.1 these cells run, in one namespace: every cell tagged "setup" above
the exercise, the exercise cell, and the cell marked `check="1.3.1"`. The wrong answers stand in
`<number>_<slug>.wrong.py`, cells marked `exercise="1.3.1" hint="text the learner must see"`, each a complete
replacement of the exercise cell.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmlab.lab import exercises, percent
from fmlab.lab.exercises import NotYet

MIN_WRONG = 3
MIN_HINT = 8  # characters: a hint that any failure contains proves nothing


@dataclass(frozen=True)
class Case:
    """One exercise of a source, with what its proof needs."""

    id: str
    source: Path
    setup: tuple[str, ...]
    stub: str
    solution: str
    check: str
    wrong: tuple[tuple[str, str, int], ...]  # code, hint, line


def cases(source: Path) -> list[Case]:
    """Read the exercises of `source`. ValueError: no check or solution, stray wrong answer."""
    cells = percent.read(source)
    wrong_file = source.with_suffix(".wrong.py")
    wrong = percent.read(wrong_file) if wrong_file.exists() else []
    checks = {cell.pairs["check"]: cell for cell in cells if "check" in cell.pairs}
    ids = [cell.pairs["exercise"] for cell in cells if "exercise" in cell.pairs]
    if stray := [id for id in checks if id not in ids]:
        raise ValueError(f"{source}: checks without an exercise: {', '.join(stray)}")
    for cell in wrong:
        if cell.pairs.get("exercise") not in ids or len(str(cell.pairs.get("hint", ""))) < MIN_HINT:
            raise ValueError(
                f'{wrong_file}:{cell.line}: mark it # %% exercise="<one of {", ".join(ids)}>" '
                f'hint="<at least {MIN_HINT} characters that the learner must see>"'
            )
    made = []
    for at, cell in enumerate(cells):
        id = cell.pairs.get("exercise")
        if id is None:
            continue
        where = f"{source}:{cell.line}: exercise {id}"
        if id not in checks:
            raise ValueError(f'{where} has no cell marked check="{id}"')
        if cell.code(True) == cell.code(False):
            raise ValueError(f"{where} has no # BEGIN SOLUTION … # END SOLUTION")
        answers = tuple(
            (one.code(True), one.pairs["hint"], one.line) for one in wrong if one.pairs["exercise"] == id
        )
        setup = tuple(one.code(True) for one in cells[:at] if "setup" in one.tags)
        made.append(
            Case(id, source, setup, cell.code(False), cell.code(True), checks[id].code(True), answers)
        )
    return made


def prove(case: Case) -> None:
    """Raise AssertionError that says what the exercise lacks."""
    where = f"{case.source.name}: exercise {case.id}"
    assert len(case.wrong) >= MIN_WRONG, f"{where}: {len(case.wrong)} wrong answers; at least {MIN_WRONG}"
    assert len({hint for _, hint, _ in case.wrong}) > 1, f"{where}: all wrong answers earn the same hint"
    exercises.find(case.id)
    base: dict[str, Any] = {"__name__": "__main__"}
    for cell in case.setup:
        _run(cell, base, f"{where}: setup")
    failure = _attempt(case.stub, case, base)
    assert failure is not None, f"{where}: the stub passes"
    assert "not solved yet" in failure.what, (
        f"{where}: the stub fails with {failure.what!r}, not 'not solved yet'"
    )
    for code, hint, line in case.wrong:
        failure = _attempt(code, case, base)
        place = f"{where}: the wrong answer at line {line}"
        assert failure is not None, f"{place} passes"
        seen = "\n".join((failure.what, *failure.hints))
        assert hint in seen, f"{place} must earn the hint {hint!r}, but the learner sees:\n{seen}"
    failure = _attempt(case.solution, case, base)
    assert failure is None, f"{where}: the solution fails:\n{failure}"


def _attempt(answer: str, case: Case, base: dict[str, Any]) -> NotYet | None:
    namespace = dict(base)
    _run(answer, namespace, f"{case.source.name}: answer to {case.id}")
    try:
        _run(case.check, namespace, f"{case.source.name}: check of {case.id}")
    except NotYet as failure:
        return failure
    return None


def _run(code: str, namespace: dict[str, Any], name: str) -> None:
    exec(compile(code, f"<{name}>", "exec"), namespace)
