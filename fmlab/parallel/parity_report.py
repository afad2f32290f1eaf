"""What a comparison with one device found: numbers by parameter, and what the pattern of them suggests."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from fmlab.parallel.layout import Layout

_ROWS_SHOWN = 8
_SAME_FACTOR = 0.02  # factors this close to each other count as the same
_ALIGNED = 0.999  # cosine above which a gradient is a multiple of the reference


class ParityError(AssertionError):
    """The layout does not compute what one device computes."""


@dataclass(frozen=True)
class Comparison:
    """One number or tensor: relative error against one device, and the error that is allowed.

    factor: how many times the reference it is (projection onto it); cosine: 1 when it is a plain multiple.
    """

    error: float
    allowed: float
    factor: float = math.nan
    cosine: float = math.nan

    @property
    def ok(self) -> bool:
        """Whether the error is a number and within what is allowed."""
        return self.error <= self.allowed  # false for nan


@dataclass(frozen=True)
class ParameterRow:
    """Gradient and updated weight of one parameter."""

    name: str
    shape: tuple[int, ...]
    gradient: Comparison
    weight: Comparison

    @property
    def ok(self) -> bool:
        """Whether both are equal to one device's."""
        return self.gradient.ok and self.weight.ok

    @property
    def excess(self) -> float:
        """How many times the allowed error it has, the worse of the two."""
        values = [c.error / c.allowed for c in (self.gradient, self.weight)]
        return math.inf if any(math.isnan(value) for value in values) else max(values)


@dataclass(frozen=True, repr=False)
class ParityReport:
    """The outcome of `parity`. `str(report)` and notebooks show it as a table."""

    engine: str
    layout: Layout
    precision: str
    steps: int
    optimizer: str
    targets: tuple[int, ...]  # targets by rank in the first step
    loss: Comparison
    grad_norm: Comparison
    rows: Sequence[ParameterRow]
    ranks_differ: Sequence[str] = field(
        default_factory=tuple
    )  # gradients or weights not the same on all ranks
    excluded: int = 0  # elements left out of the comparison of weights (AdamW only)
    misreported: Sequence[str] = field(default_factory=tuple)  # what the results of steps say wrongly

    @property
    def ok(self) -> bool:
        """Whether everything agrees with one device, and the ranks with each other."""
        numbers = self.loss.ok and self.grad_norm.ok and not self.misreported
        return numbers and all(row.ok for row in self.rows) and not self.ranks_differ

    @property
    def different(self) -> list[ParameterRow]:
        """The parameters that differ, in the order of the model."""
        return [row for row in self.rows if not row.ok]

    @property
    def worst(self) -> ParameterRow:
        """The parameter that is furthest beyond (or, if all is well, nearest to) what is allowed."""
        return max(self.rows, key=lambda row: row.excess)

    @property
    def first(self) -> ParameterRow | None:
        """The first parameter of the model that differs."""
        return next(iter(self.different), None)

    def raise_if_different(self) -> None:
        """Raise ParityError with the report when something differs."""
        if not self.ok:
            raise ParityError(f"\n{self}")

    @property
    def diagnosis(self) -> str:
        """What the pattern of differences suggests, in one sentence."""
        return diagnose(self)

    def __repr__(self) -> str:
        """Two lines without measured numbers: the verdict and the diagnosis."""
        return f"{self._parts()[0]}\n{self.diagnosis}"

    def __str__(self) -> str:
        head, numbers, table = self._parts()
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join([head, *numbers, *lines, self.diagnosis])

    def _repr_html_(self) -> str:
        head, numbers, (titles, *rows) = self._parts()
        cells = "".join(f"<th style='text-align:left'>{html.escape(title)}</th>" for title in titles)
        body = "".join(
            "<tr>"
            + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row)
            + "</tr>"
            for row in rows
        )
        text = "".join(f"<div>{html.escape(line)}</div>" for line in numbers)
        return (
            f"<b>{html.escape(head)}</b>{text}<table><tr>{cells}</tr>{body}</table>"
            f"<div>{html.escape(self.diagnosis)}</div>"
        )

    def _parts(self) -> tuple[str, list[str], list[list[str]]]:
        verdict = "EQUAL to one device" if self.ok else "DIFFERENT from one device"
        head = (
            f"parity {verdict}: engine {self.engine}, data={self.layout.data}, "
            f"micro_batches={self.layout.micro_batches}, {_others(self.layout)}{self.precision}, "
            f"{self.optimizer}, "
            f"{self.steps} step{'s' * (self.steps > 1)}, targets by rank {list(self.targets)}"
        )
        numbers = [
            f"{name}: {_show(c)}" for name, c in (("loss", self.loss), ("gradient norm", self.grad_norm))
        ]
        numbers += [f"reported wrongly: {text}" for text in self.misreported[:_ROWS_SHOWN]]
        good = len(self.rows) - len(self.different)
        numbers.append(f"parameters equal (gradient and updated weight): {good} of {len(self.rows)}")
        if self.excluded:
            numbers.append(f"weights left out, whose gradient is nearly 0: {self.excluded} elements")
        rows = sorted(self.rows, key=lambda row: -row.excess)[:_ROWS_SHOWN]
        table = [["", "parameter", "gradient error", "factor", "weight error", "allowed"]]
        for row in rows:
            table.append(
                [
                    "ok" if row.ok else "DIFFERS",
                    row.name,
                    f"{row.gradient.error:.1e}",
                    f"{row.gradient.factor:.2f}x",
                    f"{row.weight.error:.1e}",
                    f"{row.gradient.allowed:.0e}",
                ]
            )
        if len(self.rows) > len(rows):
            table.append(["", f"... {len(self.rows) - len(rows)} more, closer to one device", "", "", "", ""])
        return head, numbers, table


def _others(layout: Layout) -> str:
    """The settings beside the usual ones that are not the default."""
    plain = ("data", "micro_batches", "precision")
    changed = [f for f in fields(layout) if f.name not in plain and getattr(layout, f.name) != f.default]
    return "".join(f"{f.name}={getattr(layout, f.name)}, " for f in changed)


def _show(c: Comparison) -> str:
    factor = "" if c.ok or math.isnan(c.factor) else f", {c.factor:.4g}x one device's"
    return f"{'ok' if c.ok else 'DIFFERS'}, error {c.error:.1e} (allowed {c.allowed:.0e}){factor}"


def diagnose(report: ParityReport) -> str:
    """What the pattern of differences suggests, in one sentence."""
    if report.ok:
        return "Nothing differs beyond rounding."
    bad = [row for row in report.rows if not row.gradient.ok]
    if not bad:
        if report.first is None:
            return "All gradients and weights agree: only what the engine reports differs, or the ranks do."
        return (
            f"All gradients agree; from {report.first.name} on the update differs: clipping, the optimizer"
            f"{', or something kept from the step before' if report.steps > 1 else ''}."
        )
    where = f"{len(bad)} of {len(report.rows)} gradients differ, first {bad[0].name}"
    factors = sorted(row.gradient.factor for row in bad)
    middle = factors[len(factors) // 2]
    multiples = all(row.gradient.cosine > _ALIGNED for row in bad)
    if multiples and factors[-1] - factors[0] <= _SAME_FACTOR * abs(middle):
        return f"{where}: each is {middle:.2f}x one device's{_meaning(middle, report.layout)}"
    if report.ranks_differ:
        return f"{where}, and the ranks disagree about {len(report.ranks_differ)}: not summed over ranks?"
    if len(bad) == 1 < len(report.rows):
        return f"{where}, and no other: are all gradients of a tied parameter added up?"
    return f"{where}, by no common factor: are ranks or micro-batches weighted by their counts?"


def _meaning(factor: float, layout: Layout) -> str:
    causes = {
        float(layout.data): "scaled twice? (once too often by the number of ranks)",
        1 / layout.data: "divided twice? (once too often by the number of ranks)",
        float(layout.micro_batches): "not divided by the number of micro-batches?",
        1 / layout.micro_batches: "divided twice by the number of micro-batches?",
    }
    for value, cause in causes.items():
        if value != 1 and abs(factor - value) <= _SAME_FACTOR * value:
            return f": {cause}"
    return "."
