"""Exercises: two-line graded hints; mishaps handled once for all; the proof refuses weak exercises."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fmlab.lab import check, exercises, proof
from fmlab.lab.exercises import Answer, NotYet, exercise


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    exercises.find("9.1.1")  # a module registers once, when it is imported: not into the copy of this test
    monkeypatch.setattr(exercises, "_registry", dict(exercises._registry))
    monkeypatch.setattr(exercises, "_failures", exercises._failures.copy())

    @exercise("99.1.1", "double", returns=float)
    def double(answer: Answer) -> str:
        got = answer(3)
        if got != 6:
            raise NotYet(f"3 gives {got}", "twice, not once", "return 2 * x")
        return "one number"


def test_right() -> None:
    passed = check("99.1.1", lambda x: 2 * x)
    assert repr(passed) == "✓ 99.1.1 double: one number"
    assert "✓ <b>99.1.1 double</b>" in passed._repr_html_()


def test_hints_are_two_lines_and_get_plainer() -> None:
    def message() -> str:
        with pytest.raises(NotYet) as caught:
            check("99.1.1", lambda x: x)
        assert isinstance(caught.value, AssertionError)
        assert len(caught.value._render_traceback_()) == 2
        return str(caught.value)

    assert (
        message()
        == "✗ 99.1.1 double: 3 gives 3\nHint: twice, not once (Run the check again for a further hint.)"
    )
    assert message() == "✗ 99.1.1 double: 3 gives 3\nHint: return 2 * x"
    assert message() == "✗ 99.1.1 double: 3 gives 3\nHint: return 2 * x"
    check("99.1.1", lambda x: 6)
    assert "twice, not once" in message(), "a right answer starts the hints anew"


def test_an_answer_that_python_cannot_read_is_not_tested_by_its_forerunner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ipython = pytest.importorskip("IPython")
    cells = ["def double(x):\n    return 2 * x", "def doubled(:", 'print("double(")']
    shell = SimpleNamespace(user_ns={"In": cells})
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell)

    def double(x: float) -> float:
        return 2 * x

    check("99.1.1", double)
    cells.append("def double(x):\n    return (2 * x")
    with pytest.raises(NotYet, match=r"cannot read your double: '\(' was never closed, line 2"):
        check("99.1.1", double)


def _stub(x: float) -> float:
    raise NotImplementedError("your code here")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_stub, "not solved yet"),
        (lambda x: None, "returned None\nHint: is there a `return`"),
        (lambda x: "6", "returned str, not float"),
        (lambda x: True, "returned bool, not float"),
        (lambda: 6, "cannot be called as the docstring says"),
        (lambda x: x / 0, "raised ZeroDivisionError"),
    ],
)
def test_mishaps(answer: Callable[..., Any], message: str) -> None:
    with pytest.raises(NotYet, match=message.split("\n")[0]) as caught:
        check("99.1.1", answer)
    assert message in str(caught.value)


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"no exercise '9\.1\.9'; exercises of 9\.1: 9\.1\.1"):
        check("9.1.9", _stub)
    with pytest.raises(TypeError, match="write no parentheses"):
        check("99.1.1", 6)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="at least one hint"):
        NotYet("wrong")


SOURCE = '''# %% tags=["setup"]
TWO = 2

# %% exercise="99.1.1"
def double(x):
    """Twice x."""
    # BEGIN SOLUTION
    return TWO * x
    # END SOLUTION

# %% check="99.1.1"
check("99.1.1", double)
'''
WRONG = """# %% exercise="99.1.1" hint="twice, not once"
def double(x):
    return x

# %% exercise="99.1.1" hint="twice, not once"
def double(x):
    return x + TWO

# %% exercise="99.1.1" hint="raised ZeroDivisionError"
def double(x):
    return x / 0
"""


def _case(folder: Path, source: str = SOURCE, wrong: str = WRONG) -> proof.Case:
    path = folder / "99.1_x.py"
    path.write_text(source.replace("TWO = 2", "TWO = 2\nfrom fmlab.lab import check"))
    path.with_suffix(".wrong.py").write_text(wrong)
    (case,) = proof.cases(path)
    return case


def test_a_sound_exercise_is_proven(tmp_path: Path) -> None:
    proof.prove(_case(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return TWO * x", "return TWO + x", "the solution fails"),
        (
            "# BEGIN SOLUTION",
            "# BEGIN SOLUTION\n    pass\n    # END SOLUTION\n    # BEGIN SOLUTION",
            "proven",
        ),
        (
            "    # BEGIN SOLUTION\n",
            "    if x == 3:\n        return 6\n    # BEGIN SOLUTION\n",
            "the stub passes",
        ),
        ("return x\n", "return 6\n", "wrong answer at line 1 passes"),
        ('hint="raised Zero', 'hint="raised Zebra', "must earn the hint 'raised Zebra"),
        ('# %% exercise="99.1.1" hint="raised ZeroDivisionError"\ndef', "def", "2 wrong answers; at least 3"),
        ("return x / 0", "return x", "must earn the hint"),
    ],
)
def test_a_weak_exercise_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert (old in SOURCE) or (old in WRONG)
    case = _case(tmp_path, SOURCE.replace(old, new), WRONG.replace(old, new))
    if message == "proven":
        proof.prove(case)
        return
    with pytest.raises(AssertionError, match=message):
        proof.prove(case)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('# %% check="99.1.1"', "# %%", r'has no cell marked check="99\.1\.1"'),
        ("    # BEGIN SOLUTION\n", "", "do not pair up"),
        ('hint="twice, not once"', 'hint="twice,"', "at least 8 characters"),
        ('# %% exercise="99.1.1"\ndef', "# %%\ndef", "checks without an exercise: 99"),
    ],
)
def test_a_malformed_exercise_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert (old in SOURCE) or (old in WRONG)
    with pytest.raises(ValueError, match=message):
        _case(tmp_path, SOURCE.replace(old, new), WRONG.replace(old, new))
