"""Exercises: `check("1.3.1", fn)` tests a learner's function and answers with one ✓ line or a two-line hint.

A checker lives in `fmlab/lab/checks/` and reads like a test:

    @exercise("1.3.1", "count the parameters", returns=int)
    def count_parameters(answer: Answer) -> str:
        config = …                     # inputs that the learner cannot see
        got = answer(config)           # not solved, None, wrong type, exceptions: handled here, once for all
        if got == …:
            raise NotYet(f"got {got}", "a first hint", "a further hint, after a second failure")
        return "12 configurations, all exact"
"""

import ast
import html
import inspect
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fmlab.lab.percent import STUB

Checker = Callable[["Answer"], str]
UNSOLVED = "Solve the exercise above, then run this cell again."
SUFFIX = "(Run the check again for a further hint.)"


def show_unsolved(
    shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: int | None = None
) -> None:
    """IPython's handler of NotImplementedError: what uses an unsolved exercise says so in two lines."""
    if f'{kind.__name__}("{error}")' in STUB:
        lines = [f"\x1b[1;31m{kind.__name__}: {error}\x1b[0m", UNSOLVED]
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


class NotYet(AssertionError):
    """An answer that does not pass: what is wrong, and hints from vague to plain.

    Jupyter shows two lines, elsewhere it is an AssertionError with the same two lines.
    """

    def __init__(self, what: str, *hints: str) -> None:
        if not hints:
            raise TypeError("NotYet needs at least one hint")
        super().__init__(what, *hints)
        self.what, self.hints = what, hints
        self.label = ""
        self.shown = 0  # which hint

    def for_exercise(self, label: str, attempts: int) -> "NotYet":
        """Set the exercise's name and choose the hint for the `attempts`-th failure of this kind, from 0."""
        self.label = label
        self.shown = min(attempts, len(self.hints) - 1)
        return self

    @property
    def lines(self) -> tuple[str, str]:
        more = f" {SUFFIX}" if self.shown + 1 < len(self.hints) else ""
        return f"✗ {self.label}: {self.what}", f"Hint: {self.hints[self.shown]}{more}"

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def _render_traceback_(self) -> list[str]:
        what, hint = self.lines
        return [f"\x1b[1;31m{what}\x1b[0m", hint]


@dataclass(frozen=True)
class Passed:
    """The answer of `check` for a right solution."""

    label: str
    detail: str

    def __repr__(self) -> str:
        return f"✓ {self.label}: {self.detail}"

    def _repr_html_(self) -> str:
        return (
            '<div role="status" style="border-left:4px solid #009E73;padding:4px 10px">'
            f"✓ <b>{html.escape(self.label)}</b>: {html.escape(self.detail)}</div>"
        )


class Answer:
    """The learner's function (or class), called so that the usual mishaps become hints."""

    def __init__(self, fn: Callable[..., Any], returns: type | tuple[type, ...] | None) -> None:
        self.fn, self.returns = fn, returns
        self.name = getattr(fn, "__name__", "your function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the learner's function; NotYet if it is unsolved, fails, returns None or a wrong type."""
        value = self.call_unchecked(*args, **kwargs)
        if value is None and self.returns is not type(None):
            raise NotYet(f"{self.name} returned None", "is there a `return` on every path?")
        if self.returns is not None and not _is_instance(value, self.returns):
            wanted = _names(self.returns)
            what = f"{self.name} returned {type(value).__name__}, not {wanted}"
            raise NotYet(what, f"read the docstring: the result is {wanted}")
        return value

    def call_unchecked(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, whatever it returns; a function that works on its argument in place returns None."""
        try:
            inspect.signature(self.fn).bind(*args, **kwargs)
        except TypeError as error:
            raise NotYet(
                f"{self.name} cannot be called as the docstring says ({error})",
                "keep the parameters of the stub: their names, number and order",
            ) from None
        except ValueError:
            pass  # a callable without a signature; call it and see
        try:
            return self.fn(*args, **kwargs)
        except NotYet:
            raise
        except NotImplementedError:
            raise NotYet(
                "not solved yet", f"write the body of {self.name}, then run this cell again"
            ) from None
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f" at `{last.line}`" if last.line else ""
            message = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            raise NotYet(
                f"{self.name} raised {message}", f"it happened{where}; call it by hand and look"
            ) from None


def _check_is_read(fn: Callable[..., Any]) -> None:
    """NotYet where the notebook's newest text of `fn` is no Python: then `fn` is what stood there before."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    name = getattr(fn, "__name__", "")
    if shell is None or not name.isidentifier():
        return
    define = re.compile(rf"^(def|class) {name}\b", re.MULTILINE)
    texts = [text for text in shell.user_ns.get("In", []) if define.search(text)]
    try:
        ast.parse(texts[-1] if texts else "")
    except SyntaxError as error:
        raise NotYet(
            f"Python cannot read your {name}: {error.msg}, line {error.lineno} of its cell",
            f"mend that line and run the cell; until then {name} is what it was before",
        ) from None


def _is_instance(value: Any, wanted: type | tuple[type, ...]) -> bool:
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    if isinstance(value, bool) and bool not in kinds:
        return False
    if float in kinds and isinstance(value, int):
        return True
    return isinstance(value, kinds)


def _names(wanted: type | tuple[type, ...]) -> str:
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    return " or ".join(kind.__name__ for kind in kinds)


@dataclass(frozen=True)
class Exercise:
    """A registered checker: its id such as "1.3.1", a short title, and the type of a right answer."""

    id: str
    title: str
    checker: Checker
    returns: type | tuple[type, ...] | None


_registry: dict[str, Exercise] = {}
_failures: Counter[tuple[str, str]] = Counter()


def exercise(
    id: str, title: str, returns: type | tuple[type, ...] | None = None
) -> Callable[[Checker], Checker]:
    """Register the decorated checker for exercise `id`.

    `returns` is the type of a right answer: float takes ints too, bool is not an int; None does not look.
    """

    def register(checker: Checker) -> Checker:
        known = _registry.get(id)
        if known and known.checker.__module__ != checker.__module__:
            raise ValueError(f"exercise {id} is registered twice, in {known.checker.__module__} and here")
        _registry[id] = Exercise(id, title, checker, returns)
        return checker

    return register


def find(id: str) -> Exercise:
    """The exercise `id`; ValueError says what is registered, or where to register it."""
    from fmlab.lab.checks import MODULES

    number = id.rpartition(".")[0]
    if id not in _registry and number in MODULES:
        import_module(f"fmlab.lab.checks.{MODULES[number]}")
    if id not in _registry:
        known = sorted(key for key in _registry if key.startswith(f"{number}."))
        legal = (
            f"exercises of {number}: {', '.join(known)}"
            if known
            else f"notebooks with exercises: {', '.join(MODULES)}"
        )
        raise ValueError(f"there is no exercise {id!r}; {legal}")
    return _registry[id]


def check(id: str, fn: Callable[..., Any]) -> Passed:
    """Test `fn` as an answer to exercise `id`.

    Returns a line that says what held. Raises NotYet (an AssertionError) with what is wrong and a hint; the
    same failure again shows a further hint. ValueError for an unknown exercise, TypeError if `fn` cannot be
    called.
    """
    entry = find(id)
    label = f"{entry.id} {entry.title}"
    if not callable(fn):
        raise TypeError(
            f"check({id!r}, …) wants your function itself, not {type(fn).__name__}: write no parentheses"
        )
    try:
        _check_is_read(fn)
        detail = entry.checker(Answer(fn, entry.returns))
    except NotYet as failure:
        key = (id, failure.hints[0])
        _failures[key] += 1
        raise failure.for_exercise(label, _failures[key] - 1) from None
    for key in [key for key in _failures if key[0] == id]:
        del _failures[key]
    return Passed(label, detail)
