"""Predict before you measure: `predict` asks first, `compare` shows yours, formula and measurement."""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fmlab.extras import require
from fmlab.interactive import is_live
from fmlab.lab.table import (
    DASH,
    MAX_ROWS,
    Cell,
    Column,
    check_kind,
    html_table,
    number,
    plain_table,
    unit_text,
)

SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "%": 1e-2}
_answers: dict[str, float | None] = {}  # by question, so that running the cell again keeps what was typed


def parse_number(text: str, unit: str = "") -> float | None:
    """Read "124e6", "124M", "1.5k", "124,439,808" or "75%"; None for an empty text.

    unit: of the question. In a field of percents "75%" is 75, elsewhere it is 0.75.
    Raises ValueError with what is legal; a comma that does not part groups of three is refused: it may be a
    decimal comma.
    """
    bare = re.sub(r"[\s_]", "", text).lower()
    if not bare:
        return None
    if "," in bare:
        if not re.match(r"[+-]?[1-9]\d{0,2}(,\d{3})+(?![\d,])", bare):
            raise ValueError(
                f"cannot read {text!r}: a comma parts groups of three, as in 124,439,808; "
                "write 12.5 with a point"
            )
        bare = bare.replace(",", "")
    found = re.fullmatch(r"([+-]?\d*\.?\d+(?:e[+-]?\d+)?|\d+\.)([kmgbt%]?)", bare)
    if not found:
        raise ValueError(f"cannot read {text!r} as a number; write for example 124e6, 124M, 1.5k or 75%")
    if found[1].startswith("-") and re.fullmatch(r"([KMGT]i?)?B|bytes", unit):
        raise ValueError(f"cannot read {text!r} as a number of {unit}: there are none below 0")
    if found[2] == "%" and unit == "%":
        return float(found[1])
    return float(found[1]) * SUFFIXES[found[2]]


def _as_typed(value: float | None) -> str:
    """A learner's number as it is: it is theirs, and does not depend on the machine."""
    return number(value) if value is None else f"{value:,.10g}"


class Prediction:
    """A learner's number for a question; `value` is None until there is one."""

    def __init__(self, question: str, unit: str, yours: float | None) -> None:
        self.question, self.unit = question, unit_text(unit)
        self.value = yours if yours is not None else _answers.get(question)
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def set(self, value: float | None) -> None:
        self.value = _answers[self.question] = value
        for listener in self._listeners:
            listener()

    def __repr__(self) -> str:
        yours = "" if self.value is None else f" Your number: {_as_typed(self.value)}."
        return f"Your prediction first: {self.question}{f' [{self.unit}]' if self.unit else ''}{yours}"

    def _repr_html_(self) -> str:
        answer = (
            "run this cell to type your number"
            if self.value is None
            else f"your number: {_as_typed(self.value)}"
        )
        return (
            '<div style="border-left:4px solid #0072B2;padding:4px 10px"><b>Your prediction first.</b> '
            f"{html.escape(self.question)} <i>{html.escape(self.unit)}</i> ({answer})</div>"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        static = {"text/plain": repr(self), "text/html": self._repr_html_()}
        return {**static, **_view(self._box())} if is_live() else static

    def _box(self) -> Any:
        widgets = require("lab", "ipywidgets")
        shown = "" if self.value is None else f"{self.value:g}"
        field = widgets.Text(
            value=shown,
            placeholder="for example 1.5k",
            continuous_update=False,
            layout=widgets.Layout(width="260px"),
        )
        field.description, field.style.description_width = "Your number", "auto"
        field.tooltip = self.question
        note = widgets.HTML(html.escape(self.unit))

        def on_input(change: dict[str, Any]) -> None:
            try:
                self.set(parse_number(change["new"], self.unit))
            except ValueError as error:
                note.value = f'<span role="alert">{html.escape(str(error))}</span>'
            else:
                noted = "" if self.value is None else f"(noted: {_as_typed(self.value)})"
                note.value = f'{html.escape(self.unit)} <span role="status">{noted}</span>'

        field.observe(on_input, "value")
        question = widgets.HTML(f"<b>Your prediction first.</b> {html.escape(self.question)}")
        return widgets.VBox([question, widgets.HBox([field, note])])


def predict(question: str, unit: str = "", yours: float | None = None) -> Prediction:
    """Ask for a number before it is measured; display the result, and give it to `compare` as `yours`.

    In a live page an input box appears; `yours=…` does the same in text. Nothing depends on an answer.
    """
    return Prediction(question, unit, yours)


@dataclass(frozen=True)
class Row:
    """One quantity of a comparison. `formula` is modelled by us, `quoted` comes from `source`.

    Whole numbers are printed exactly, others to `digits` significant digits. `noisy` marks a measurement that
    differs from run to run (a timing): it is shown with ≈ and not compared by the tests.
    """

    what: str
    yours: Prediction | float | None = None
    formula: float | None = None
    measured: float | None = None
    quoted: float | None = None
    unit: str = ""
    digits: int = 3
    noisy: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if self.quoted is not None:
            check_kind("quoted", self.source, f"row {self.what!r}")
        if self.formula is None and self.measured is None and self.quoted is None:
            raise ValueError(f"row {self.what!r} compares nothing: give it formula=, measured= or quoted=")

    @property
    def yours_value(self) -> float | None:
        return self.yours.value if isinstance(self.yours, Prediction) else self.yours

    @property
    def reference(self) -> float | None:
        return self.formula if self.formula is not None else self.quoted

    def cells(self) -> dict[str, Cell]:
        """By column; the comparison leaves out the columns that no row fills."""
        ratio = None
        if self.reference and self.measured is not None:
            ratio = f"{self.measured / self.reference:.{max(self.digits - 1, 2)}f}"
        return {
            "what": Cell(self.what, right=False),
            "unit": Cell(unit_text(self.unit), right=False),
            "yours": Cell(self._yours_text()),
            "formula": Cell(number(self.formula, self.digits)),
            "published": Cell(number(self.quoted, self.digits)),
            "measured": Cell(number(self.measured, self.digits), self.noisy and self.measured is not None),
            "ratio": Cell(number(ratio), self.noisy and ratio is not None),
        }

    def _yours_text(self) -> str:
        value = self.yours_value
        truth = self.measured if self.measured is not None else self.reference
        if value is None or not truth:
            return _as_typed(value)
        return f"{_as_typed(value)} (x{value / truth:.2f})"


class Comparison:
    """The table *yours / formula / measured*; in a live page it follows what the learner types."""

    def __init__(self, rows: list[Row], title: str) -> None:
        self.rows, self.title = rows, title

    def _parts(self) -> tuple[list[Column], list[list[Cell]], str]:
        published = any(row.quoted is not None for row in self.rows)
        columns = {
            "what": Column("what"),
            "unit": Column("unit"),
            "yours": Column("yours"),
            "formula": Column("formula", kind="modelled"),
            "published": Column("published", kind="quoted"),
            "measured": Column("measured", kind="measured"),
            "ratio": Column("measured/expected" if published else "measured/formula"),
        }
        rows = [row.cells() for row in self.rows]
        always = ("what", "unit", "yours", "measured")
        shown = [name for name in columns if name in always or any(row[name].text != DASH for row in rows)]
        sources = dict.fromkeys(row.source for row in self.rows if row.source)
        note = f"Quoted from: {'; '.join(sources)}" if sources else ""
        return [columns[name] for name in shown], [[row[name] for name in shown] for row in rows], note

    def __repr__(self) -> str:
        columns, rows, note = self._parts()
        return "\n".join(part for part in (self.title, plain_table(columns, rows), note) if part)

    def _repr_html_(self) -> str:
        columns, rows, note = self._parts()
        return html_table(columns, rows, self.title, note)

    def _widget_html(self) -> str:
        # Inside a widget Lab centres tables; elsewhere they stand on the left, and so shall this one.
        table = self._repr_html_().replace("<table>", '<table style="margin-left:0">', 1)
        return f'<div class="jp-RenderedHTMLCommon">{table}</div>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        static = {"text/plain": repr(self), "text/html": self._repr_html_()}
        predictions = [row.yours for row in self.rows if isinstance(row.yours, Prediction)]
        if not predictions or not is_live():
            return static
        page = require("lab", "ipywidgets").HTML(self._widget_html())

        def refresh() -> None:
            page.value = self._widget_html()

        for prediction in predictions:
            prediction.on_change(refresh)
        return {**static, **_view(page)}


def _view(widget: Any) -> dict[str, Any]:
    bundle = widget._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    kind = "application/vnd.jupyter.widget-view+json"
    return {kind: data[kind]}


def compare(*rows: Row | str, title: str = "", **one_row: Any) -> Comparison:
    """Set predictions, formulas and measurements side by side, with the ratio measured/formula.

    `compare(Row("bytes", yours=guess, formula=…, measured=…, unit="B"), Row(…))`, or for a single row
    `compare("bytes", yours=guess, formula=…, measured=…, unit="B")`. At most 12 rows.
    """
    # region one row
    if len(rows) == 1 and isinstance(rows[0], str):
        return Comparison([Row(rows[0], **one_row)], title)
    # endregion
    made = [row for row in rows if isinstance(row, Row)]
    if one_row or len(made) != len(rows) or not made:
        raise ValueError(
            'compare takes one name and its numbers, compare("bytes", formula=…), or Row(…) objects'
        )
    if len(made) > MAX_ROWS:
        raise ValueError(f"{len(made)} rows; a comparison has at most {MAX_ROWS}")
    return Comparison(made, title)
