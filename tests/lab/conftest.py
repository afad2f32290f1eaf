"""What nbval compares of an output."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

SANITIZE = Path(__file__).parents[1] / "notebooks" / "sanitize.cfg"


@pytest.fixture(scope="session")
def sanitized() -> Callable[[str], str]:
    """Replaces what nbval is told not to compare, as nbval reads that file."""
    text = SANITIZE.read_text(encoding="utf-8")
    rules = re.findall(r"^regex: (.*)$\n^replace: (.*)$", text, flags=re.MULTILINE)
    assert len(rules) == len(re.findall(r"^\[", text, flags=re.MULTILINE))

    def apply(output: str) -> str:
        for pattern, replacement in rules:
            output = re.sub(pattern, replacement, output)
        return output

    return apply
