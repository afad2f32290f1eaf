"""Small tables with units, and a label on each figure: measured, modelled, quoted or given."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MAX_ROWS = 12
KINDS = ("measured", "modelled", "quoted", "given")
COLOURS = {"measured": "#0072B2", "modelled": "#8A5A00", "quoted": "#8F4E77", "given": "#555555"}
DASH = "—"


def check_kind(kind: str, source: str, what: str) -> None:
    """Raise ValueError unless `kind` is one of KINDS, and "quoted" comes with its source."""
    if kind not in KINDS:
        raise ValueError(f"{what}: {kind!r} is not a kind of figure; legal are: {', '.join(KINDS)}")
    if kind == "quoted" and not source:
        raise ValueError(f"{what}: a quoted figure needs source='paper, section or table'")


def number(value: Any, digits: int = 3) -> str:
    """Text of a cell: whole numbers exact, others to `digits` significant ones (to survive another CPU)."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    if not isinstance(value, Real):
        return str(value)
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if exponent < -4 or exponent > 8:
        return f"{value / 10**exponent:.{digits - 1}f}e{exponent}"
    return f"{round(value, digits - 1 - exponent):,.{max(digits - 1 - exponent, 0)}f}"


def unit_text(unit: str) -> str:
    """What is printed for a unit: nothing for "1", that of a plain number."""
    return "" if unit == "1" else unit


@dataclass(frozen=True)
class Cell:
    """Text of a table cell; `noisy` marks a figure that differs from run to run (a timing)."""

    text: str
    noisy: bool = False
    right: bool = True

    @property
    def plain(self) -> str:
        return f"≈{self.text}" if self.noisy else self.text

    @property
    def html(self) -> str:
        text = html.escape(self.plain)
        return f'<span class="fm-noisy">{text}</span>' if self.noisy else text


@dataclass(frozen=True)
class Column:
    """Heading of a table column."""

    name: str
    unit: str = ""
    kind: str = ""

    @property
    def plain(self) -> str:
        return self.name + (f" [{unit_text(self.unit)}]" if unit_text(self.unit) else "")


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    """Aligned text; a noisy column has a fixed width, so that alignment does not depend on its numbers."""
    lines = [[column.plain for column in columns]]
    if any(column.kind for column in columns):
        lines.append([column.kind for column in columns])
    lines += [[cell.plain for cell in row] for row in rows]
    widths = []
    for at in range(len(columns)):
        noisy = any(row[at].noisy for row in rows)
        widths.append(
            max([14 if noisy else 0, *(len(line[at]) for line in lines if not noisy or "≈" not in line[at])])
        )
    right = [bool(rows) and all(row[at].right for row in rows) for at in range(len(columns))]
    done = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in lines
    ]
    heads = len(lines) - len(rows)
    return "\n".join(line.rstrip() for line in [*done[:heads], "-" * max(map(len, done)), *done[heads:]])


def html_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], title: str, note: str) -> str:
    """A table that screen readers can walk through, readable on light and dark pages."""

    def head(column: Column) -> str:
        unit = unit_text(column.unit)
        unit = f" <span style='font-weight:normal'>[{html.escape(unit)}]</span>" if unit else ""
        name = f"{html.escape(column.name)}{unit}{badge(column.kind)}"
        return f'<th scope="col" style="text-align:left">{name}</th>'

    def body(cell: Cell) -> str:
        align = "right" if cell.right else "left"
        return f'<td style="text-align:{align};font-variant-numeric:tabular-nums">{cell.html}</td>'

    caption = (
        f'<caption style="text-align:left;font-weight:bold">{html.escape(title)}</caption>' if title else ""
    )
    heads = "".join(head(column) for column in columns)
    bodies = "".join("<tr>" + "".join(body(cell) for cell in row) + "</tr>" for row in rows)
    foot = f'<div style="font-size:12px">{html.escape(note)}</div>' if note else ""
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{bodies}</tbody></table>{foot}"


def badge(kind: str) -> str:
    """A small coloured label; the word carries the meaning, the colour only helps."""
    if not kind:
        return ""
    style = "color:#fff;border-radius:3px;padding:0 5px;font-size:11px;font-weight:normal"
    return f' <span style="background:{COLOURS[kind]};{style}">{kind}</span>'


class Table:
    """A table of at most 12 rows.

    `columns` maps a heading to its values. Every column of numbers needs a kind in `kinds` (measured,
    modelled, quoted, given: chosen by us) and most need a unit in `units`. Whole numbers are printed exactly,
    others to `digits` significant digits. Columns named in `noisy` hold timings: shown with ≈, not compared
    by the tests.

    Raises ValueError for uneven columns, too many rows, a missing kind, or a quoted column without `source`.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any]],
        kinds: Mapping[str, str] | None = None,
        units: Mapping[str, str] | None = None,
        digits: int = 3,
        noisy: Sequence[str] = (),
        title: str = "",
        source: str = "",
    ) -> None:
        kinds, units = kinds or {}, units or {}
        lengths = {len(values) for values in columns.values()}
        if len(lengths) != 1:
            raise ValueError(f"columns of unequal length: { {name: len(v) for name, v in columns.items()} }")
        if (rows := lengths.pop()) > MAX_ROWS:
            raise ValueError(
                f"{rows} rows; a table in a lesson has at most {MAX_ROWS}: choose, or draw a figure"
            )
        for given, what in ((kinds, "kinds"), (units, "units"), (dict.fromkeys(noisy), "noisy")):
            if unknown := [name for name in given if name not in columns]:
                raise ValueError(
                    f"{what} names no column: {', '.join(unknown)}; columns are: {', '.join(columns)}"
                )
        for name, values in columns.items():
            if name in kinds:
                check_kind(kinds[name], source, f"column {name!r}")
            elif any(isinstance(value, Real) and not isinstance(value, bool) for value in values):
                raise ValueError(
                    f"column {name!r} holds numbers: say in kinds what they are: {', '.join(KINDS)}"
                )
        self.columns = [Column(name, units.get(name, ""), kinds.get(name, "")) for name in columns]
        self.title, self.note = title, f"Quoted from: {source}" if source else ""
        self.rows = [
            [
                Cell(number(value, digits), name in noisy and value is not None, not isinstance(value, str))
                for name, value in zip(columns, row, strict=True)
            ]
            for row in zip(*columns.values(), strict=True)
        ]

    def __repr__(self) -> str:
        return "\n".join(
            part for part in (self.title, plain_table(self.columns, self.rows), self.note) if part
        )

    def _repr_html_(self) -> str:
        return html_table(self.columns, self.rows, self.title, self.note)
