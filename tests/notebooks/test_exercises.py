"""Each exercise of each source: the stub fails, every wrong answer earns its hint, the solution passes."""

from pathlib import Path

import pytest

from fmlab.lab import proof
from fmlab.lab.curriculum import notebooks_folder

FIXTURES = Path(__file__).parent / "fixtures"
SOURCES = sorted(
    path
    for folder in (notebooks_folder() / "sources", FIXTURES / "sources")
    for path in folder.rglob("*.py")
    if not path.name.endswith(".wrong.py")
)
CASES = [case for source in SOURCES for case in proof.cases(source)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_exercise_is_proven(case: proof.Case) -> None:
    proof.prove(case)
