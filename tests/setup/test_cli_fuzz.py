"""A few dozen of the command lines that `make soak` draws by the hundred."""

import random
from pathlib import Path

import pytest

from tests.soak import fuzz


@pytest.mark.slow
def test_any_command_line_ends_with_what_was_asked_for_or_a_line_of_advice(tmp_path: Path) -> None:
    """train with flags, files and resumed runs, parity, data, export, new, lab, checkpoints: no traceback."""
    ends = fuzz.fuzz(tmp_path, 40, random.Random(0), seconds=2)
    assert ends["refused"] > 15
    assert ends["runs"] + ends["done"] > 3


def test_a_traceback_and_an_end_without_a_word_do_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(words: list[str]) -> int:
        raise KeyError(words[0])

    monkeypatch.setattr(fuzz, "prepare", fuzz.Place)
    monkeypatch.setattr(fuzz, "COMMANDS", {"chips": (lambda draw, place: ["list"], 1)})
    assert fuzz.fuzz(tmp_path / "a", 1, random.Random(0)) == {"done": 1}
    for fault, said in ((broken, r"KeyError: 'chips'"), (lambda words: 2, r"\]: 2"), (lambda words: 7, r"7")):
        monkeypatch.setattr(fuzz, "fmlab", fault)
        with pytest.raises(AssertionError, match=said):
            fuzz.fuzz(tmp_path / str(len(said)), 1, random.Random(0))
