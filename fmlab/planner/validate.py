"""How right the planner is: its step times beside published ones, publication by publication.

    compared = compare(predict)                   predicted and published seconds of a step, row by row
    for one in by_group(compared): print(one)     errors of each publication
    overall(by_group(compared))                   averaged over publications, not rows: one has 140 of them

`predict` takes a PublishedRun and returns seconds, so that any model can be judged in the same way: the
planner, or the baseline that it must beat, one constant utilisation for each chip (`constant_utilisation`).
Errors are of the step time: predicted / published - 1. Publications count FLOPs in different ways; where only
a rate was published, it was converted by the publication's own way (fmlab.planner.reported).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean, median

from fmlab.chips import chip
from fmlab.planner.flops import flops_per_step
from fmlab.planner.published import PublishedRun, runs

Predict = Callable[[PublishedRun], float]


@dataclass(frozen=True)
class Compared:
    """One row: seconds of a step, predicted and published."""

    run: PublishedRun
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """Signed: above 0 where the planner is too pessimistic."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class GroupErrors:
    """Errors of one publication.

    rows: that were predicted; of: rows that are fully specified. median, p90: of the absolute errors.
    bias: median of the signed ones. worst: the rows that are furthest off, the furthest first.
    """

    group: str
    rows: int
    of: int
    median: float
    p90: float
    bias: float
    worst: tuple[Compared, ...]

    def __str__(self) -> str:
        return (
            f"{self.group:42} {self.rows:4} of {self.of:<4} median {self.median:6.1%}  "
            f"90th {self.p90:6.1%}  bias {self.bias:+6.1%}"
        )


@dataclass(frozen=True)
class Overall:
    """Means over publications of their medians and 90th percentiles; coverage of fully specified rows."""

    groups: int
    rows: int
    of: int
    median: float
    p90: float


def compare(predict: Predict, rows: Iterable[PublishedRun] | None = None) -> tuple[Compared, ...]:
    """Predictions of all rows that are fully specified and can be predicted, or of `rows`.

    Raises ValueError for a row of `rows` that cannot be predicted, with its reason.
    """
    asked = runs(fully_specified=True) if rows is None else tuple(rows)
    found = []
    for run in asked:
        if not run.cannot:
            found.append(Compared(run, predict(run), run.step_seconds()))
        elif rows is not None:
            raise ValueError(f"{run.id} cannot be predicted: {run.cannot}")
    return tuple(found)


def by_group(compared: Sequence[Compared], worst: int = 3) -> tuple[GroupErrors, ...]:
    """Errors of each publication, in the order of the record."""
    found = []
    for group in dict.fromkeys(one.run.group for one in compared):
        own = [one for one in compared if one.run.group == group]
        off = sorted(abs(one.error) for one in own)
        found.append(
            GroupErrors(
                group,
                len(own),
                max(len(own), sum(run.group == group for run in runs(fully_specified=True))),
                median(off),
                quantile(off, 0.9),
                median(one.error for one in own),
                tuple(sorted(own, key=lambda one: -abs(one.error))[:worst]),
            )
        )
    return tuple(found)


def overall(groups: Sequence[GroupErrors]) -> Overall:
    """The average publication. Raises ValueError for none."""
    if not groups:
        raise ValueError("nothing was compared")
    return Overall(
        len(groups),
        sum(one.rows for one in groups),
        len(runs(fully_specified=True)),
        mean(one.median for one in groups),
        mean(one.p90 for one in groups),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, interpolated between neighbours."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


# ---- the baseline ------------------------------------------------------------------------------------------


def constant_utilisation(rows: Iterable[PublishedRun] | None = None) -> Predict:
    """The baseline: every step of a chip runs at one share of its peak, the typical one of `rows`.

    The share is of model FLOPs (all pairs of positions count) and the peak of the row's precision. It is the
    geometric mean over publications of their own; a chip that no row has gets that of all chips.
    """
    shares: dict[str, dict[str, list[float]]] = {}
    for run in runs(fully_specified=True) if rows is None else rows:
        if not run.cannot:
            own = shares.setdefault(str(run.chip), {}).setdefault(run.group, [])
            own.append(log(_least_seconds(run) / run.step_seconds()))
    by_chip = {name: mean(map(mean, groups.values())) for name, groups in shares.items()}
    anywhere = mean(by_chip.values())

    def predict(run: PublishedRun) -> float:
        return _least_seconds(run) / exp(by_chip.get(str(run.chip), anywhere))

    return predict


def _least_seconds(run: PublishedRun) -> float:
    """Seconds of a step at the published peak."""
    work = flops_per_step(run.shape(), int(run.global_batch or 0), run.seq_len).model
    peak = chip(str(run.chip)).peak_flops(run.precision)
    return work / (int(run.chips or 0) * peak)
