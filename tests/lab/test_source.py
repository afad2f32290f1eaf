"""show_source shows at most a page, with its place."""

import dataclasses
from collections.abc import Callable

import pytest

import fmlab.lab.builder
from fmlab.lab import compare, show_source
from fmlab.lab.prediction import parse_number


def test_a_function_with_its_place_and_line_numbers() -> None:
    view = show_source(parse_number)
    first = parse_number.__code__.co_firstlineno
    assert repr(view).startswith(f"fmlab/lab/prediction.py, lines {first}–")  # noqa: RUF001
    assert view.text.startswith("def parse_number(text: str, unit: str = ")
    assert f">{first:4d}</span>" in view._repr_html_()
    assert view._repr_html_().count("fm-line") == len(view.lines)


def test_a_region_is_shown_without_its_marks() -> None:
    view = show_source(compare, region="one row")
    assert view.text.startswith("if len(rows) == 1")
    assert "region" not in view.text
    assert show_source(fmlab.lab.prediction, region="one row") == view


def test_too_long_or_unknown_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"more than the 30 .* mark a part of it"):
        show_source(fmlab.lab.builder)
    with pytest.raises(ValueError, match=r"name one of its regions: one row"):
        show_source(fmlab.lab.prediction)
    with pytest.raises(ValueError, match=r"no region 'x' in compare; it has: one row"):
        show_source(compare, region="x")
    with pytest.raises(ValueError, match="len has no Python source"):
        show_source(len)


def test_a_move_within_the_file_is_no_difference_but_other_code_is(sanitized: Callable[[str], str]) -> None:
    view = show_source(parse_number)
    moved = dataclasses.replace(view, lines=tuple((at + 1000, line) for at, line in view.lines))
    other = dataclasses.replace(view, lines=(*view.lines[:-1], (view.lines[-1][0], "    return 0")))
    for form in (repr, lambda one: one._repr_html_()):
        assert form(moved) != form(view)
        assert sanitized(form(moved)) == sanitized(form(view))
        assert sanitized(form(other)) != sanitized(form(view))
