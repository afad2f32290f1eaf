"""Each exercise of each source: the stub fails, every wrong answer earns its hint, the solution passes."""

from pathlib import Path

import pytest

from fmlab.lab import proof
from fmlab.lab.curriculum import notebooks_folder

FIXTURES = Path(__file__).parent / "fixtures"


def _sources(folder: Path) -> list[Path]:
    found = (folder / "sources").rglob("*.py")
    return sorted(path for path in found if not path.name.endswith(".wrong.py"))


def _cases(source: Path) -> list[tuple[str, proof.Case | ValueError]]:
    try:
        return [(case.id, case) for case in proof.cases(source)]
    except ValueError as error:  # a malformed source fails alone
        return [(source.stem, error)]


SOURCES = _sources(notebooks_folder()) + _sources(FIXTURES)
CASES = [pytest.param(case, id=id) for source in SOURCES for id, case in _cases(source)]


@pytest.mark.parametrize("case", CASES)
def test_exercise_is_proven(case: proof.Case | ValueError) -> None:
    if isinstance(case, ValueError):
        raise case
    proof.prove(case)


@pytest.mark.parametrize("source", _sources(notebooks_folder()), ids=lambda source: source.stem)
def test_two_core_exercises_and_an_optional_one(source: Path) -> None:
    assert len(proof.cases(source)) >= 3
