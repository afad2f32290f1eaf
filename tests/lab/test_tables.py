"""Tables and comparisons: exact integers, rounded floats, labels required, timings not compared."""

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmlab.lab import Row, Table, compare, predict, within
from fmlab.lab.prediction import parse_number
from fmlab.lab.table import number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (124_439_808, "124,439,808"),
        (1.23456, "1.23"),
        (0.000123456, "0.000123"),
        (9.999, "10.0"),
        (123456.0, "123,000"),
        (1.5e-7, "1.50e-7"),
        (9.996e11, "1.00e12"),
        (-2.5, "-2.50"),
        (0.0, "0"),
        (None, "—"),
        (True, "yes"),
        (math.nan, "nan"),
        ("gloo", "gloo"),
    ],
)
def test_number(value: object, text: str) -> None:
    assert number(value) == text


@given(st.floats(min_value=1e-12, max_value=1e15))
def test_number_keeps_three_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)


def test_a_table_needs_labels_and_few_rows() -> None:
    with pytest.raises(ValueError, match=r"'bytes' holds numbers: say in kinds"):
        Table({"bytes": [1]})
    with pytest.raises(ValueError, match="needs source="):
        Table({"bytes": [1]}, kinds={"bytes": "quoted"})
    with pytest.raises(ValueError, match="legal are: measured, modelled, quoted, given"):
        Table({"bytes": [1]}, kinds={"bytes": "guessed"})
    with pytest.raises(ValueError, match="13 rows"):
        Table({"name": ["a"] * 13})
    with pytest.raises(ValueError, match="unequal length"):
        Table({"a": ["x"], "b": []})
    with pytest.raises(ValueError, match="units names no column: c"):
        Table({"a": ["x"]}, units={"c": "B"})


def test_a_timing_is_shown_but_not_compared(sanitized: Callable[[str], str]) -> None:
    def table(seconds: float) -> Table:
        columns = {"layer": ["a", "b"], "time": [seconds, 2.0], "bytes": [7, 1234]}
        kinds = {"time": "measured", "bytes": "modelled"}
        return Table(columns, kinds=kinds, units={"time": "ms", "bytes": "B"}, noisy=["time"])

    fast, slow = table(1.5), table(12345.678)
    assert "≈1.50" in repr(fast)
    assert "1,234" in sanitized(repr(fast))
    for form in (repr, lambda one: one._repr_html_()):
        assert form(fast) != form(slow)
        assert sanitized(form(fast)) == sanitized(form(slow))


def test_compare_shows_ratio_kind_and_source() -> None:
    text = repr(
        compare(
            Row("bytes", yours=50, formula=100, measured=103, unit="B"),
            Row("loss", quoted=3.0, source="A paper, table 1", measured=3.3, unit="nats/token", digits=2),
        )
    )
    assert re.search(r"bytes +B +50 \(x0\.49\) +100 +— +103 +1\.03", text)
    assert re.search(r"loss +nats/token +— +— +3\.0 +3\.3 +1\.10", text)
    assert text.endswith("Quoted from: A paper, table 1")
    assert "modelled" in text
    assert "measured" in text


def test_a_column_that_no_row_fills_is_left_out() -> None:
    text = repr(compare("characters", yours=3, measured=4.1, unit="characters"))
    assert "formula" not in text
    assert "published" not in text
    assert "yours" in repr(compare("characters", formula=3, unit="characters"))


def test_a_bound_is_shown_with_its_number_and_only_the_number_may_change(
    sanitized: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    def line(value: float) -> str:
        within("off by", value, below=1e-6, unit="nats")
        return capsys.readouterr().out

    assert line(2.44e-7) == "off by: ≈2.4e-7 nats, below 1e-6 nats: yes\n"
    assert sanitized(line(2.44e-7)) == sanitized(line(0.0)) != sanitized(line(1e-6))
    assert line(math.nan).endswith(": NO\n")
    within("right", 1234.5, above=40, below=1500, unit="1", digits=3)
    assert capsys.readouterr().out == "right: ≈1,230, above 40 and below 1,500: yes\n"
    with pytest.raises(ValueError, match="has no bound"):
        within("off by", 1.0)


def test_the_unit_of_a_plain_number_is_not_printed() -> None:
    assert not re.search(r"spread +1", repr(compare("spread", measured=0.5, unit="1")))
    assert repr(predict("By how much?", unit="1")) == "Your prediction first: By how much?"
    table = Table({"spread": [0.5]}, kinds={"spread": "measured"}, units={"spread": "1"})
    assert "[" not in repr(table) + table._repr_html_()


def test_compare_refuses_nothing_and_too_much() -> None:
    with pytest.raises(ValueError, match="compares nothing"):
        compare("bytes")
    with pytest.raises(ValueError, match="needs source="):
        compare("bytes", quoted=1.0)
    with pytest.raises(ValueError, match=r"Row\(…\)"):
        compare("a", "b", formula=1)
    with pytest.raises(ValueError, match="at most 12"):
        compare(*[Row("a", formula=1)] * 13)


def test_a_prediction_reaches_the_comparison_later() -> None:
    guess = predict("How many?", unit="B")
    table = compare("bytes", yours=guess, formula=100, measured=100)
    assert guess.value is None
    seen: list[str] = []
    guess.on_change(lambda: seen.append(repr(table)))
    guess.set(80.1234)
    assert "80.1234 (x0.80)" in seen[0], "a learner's number is not rounded"
    assert predict("How many?").value == 80.1234, "running the cell again keeps the answer"
    assert predict("How many?", yours=7).value == 7


def test_headless_a_prediction_is_one_static_line() -> None:
    guess = predict("How many bytes?", unit="B")
    assert repr(guess) == "Your prediction first: How many bytes? [B]"
    assert set(guess._repr_mimebundle_()) == {"text/plain", "text/html"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("124e6", 124e6),
        ("124M", 124e6),
        ("1.5k", 1500),
        ("75 %", 0.75),
        ("1,234,567", 1234567),
        ("", None),
        (".5", 0.5),
    ],
)
def test_learners_numbers(text: str, value: float | None) -> None:
    assert parse_number(text) == value


def test_a_percent_sign_changes_nothing_in_a_field_of_percents() -> None:
    assert parse_number("11.5 %", "%") == parse_number("11.5", "%") == 11.5
    assert parse_number("-1,024.5k") == -1_024_500


@pytest.mark.parametrize("text", ["12,5", "0,466", "1,23,456", "1,2345", ",5", "4,5"])
def test_what_may_be_a_decimal_comma_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a comma parts groups of three"):
        parse_number(text)


@pytest.mark.parametrize("text", ["many", "1.2.3", "12 MB", "--3"])
def test_not_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="for example 124e6"):
        parse_number(text)
