"""Fit a few constants of the planner to published runs, and ask how well they do on publications not used.

    fitted = fit(rows, predict)              predict(run, calibration) -> seconds of a step
    held_out(rows, predict)                  for each publication, what is fitted to all the others

Each constant is physical (fmlab.planner.calibration says what), and each has a prior: the value that one
would take without the record, and how far off one would expect it to be. What the record says little about
stays near its prior, so that there is no constant that a single row can bend. A publication of n rows counts
as the square root of n rows: rows of one publication are alike, not independent.

The method is Gauss-Newton on the logarithms of times and constants, with weights that let outliers count as
their absolute, not squared, error (iteratively reweighted least squares; Holland and Welsch 1977).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from fmlab.chips import chip
from fmlab.planner.calibration import Calibration
from fmlab.planner.predicted import older
from fmlab.planner.published import PublishedRun

PredictWith = Callable[[PublishedRun, Calibration], float]
#: A relative error up to which residuals count as squares: what rounding and noise of the record are.
NOISE = 0.02
#: The mean absolute relative error that a good model of the record would have: what a prior weighs against.
TYPICAL = 0.04


@dataclass(frozen=True)
class Constant:
    """A number to fit. key: of an entry of a table (a chip, a chip and dtype), or "" for a plain field.

    prior: its value without the record. spread: one standard deviation of its logarithm. most: its limit.
    """

    field: str
    key: str
    prior: float
    spread: float
    most: float = float("inf")

    @property
    def name(self) -> str:
        return f"{self.field}[{self.key!r}]" if self.key else self.field

    def concerns(self, run: PublishedRun) -> bool:
        """Whether a row's prediction can depend on it."""
        if self.field == "attention_of":
            return self.key == (older(run) or run.chip)
        return self.key in ("", f"{run.chip} {_dtype(run)}")

    def of(self, calibration: Calibration) -> float:
        value = getattr(calibration, self.field)
        found = float(value.get(self.key, self.prior) if self.key else value)
        return found or self.prior  # a share of 0 has no logarithm: begin at the prior

    def put(self, calibration: Calibration, value: float) -> Calibration:
        """The calibration with this constant at `value`, kept inside its limits."""
        inside = min(value, self.most)
        if not self.key:
            return calibration.changed(**{self.field: inside})
        table = dict(getattr(calibration, self.field)) | {self.key: inside}
        return calibration.changed(**{self.field: table})


#: Plain fields that are fitted: what one would take without the record, and how far off that may be (1: by a
#: factor of e).
PLAIN = {
    "rows_half": (128.0, 0.4),
    "width_half": (128.0, 0.4),
    "misaligned": (0.8, 0.2),
    "memory": (0.8, 0.15),
    "passes": (1.2, 0.3),
    "passes_eager": (2.0, 0.4),
    "inside": (0.8, 0.15),
    "between": (0.8, 0.15),
    "launch": (100e-6, 0.5),
    "hidden_gradients": (0.8, 0.3),
    "hidden_gathers": (0.8, 0.3),
    "hidden_tensor": (0.5, 0.5),
    "hidden_context": (0.5, 0.5),
    "hidden_pipeline": (0.5, 0.5),
}


def constants(rows: Iterable[PublishedRun], start: Calibration) -> list[Constant]:
    """What is fitted to these rows: plain fields, and rates of the chips and dtypes that occur in them."""
    used = [Constant(name, "", prior, spread, _most(name)) for name, (prior, spread) in PLAIN.items()]
    pairs = sorted({(str(run.chip), _dtype(run)) for run in rows if not run.cannot})
    for name, dtype in pairs:
        share = Calibration().matmul_share(chip(name), dtype)
        used.append(Constant("matmul", f"{name} {dtype}", share, 0.2, 1.0))
    kernels = {older(run) or str(run.chip) for run in rows if not run.cannot}
    used += [Constant("attention_of", name, start.attention, 0.4, 1.0) for name in sorted(kernels)]
    return used


def _dtype(run: PublishedRun) -> str:
    """bf16 for fp16 where a chip has both: the same units multiply them."""
    both = run.precision == "fp16" and "bf16" in chip(str(run.chip)).dtypes
    return "bf16" if both else str(run.precision)


def _most(field: str) -> float:
    return float("inf") if field in ("rows_half", "width_half", "passes", "passes_eager", "launch") else 1.0


def fit(
    rows: Sequence[PublishedRun],
    predict: PredictWith,
    start: Calibration | None = None,
    iterations: int = 6,
) -> Calibration:
    """The calibration that predicts `rows` best. start: where to begin; by default the documented values.

    Raises ValueError where no row can be predicted.
    """
    known = [run for run in rows if not run.cannot]
    if not known:
        raise ValueError("no row that can be predicted: there is nothing to fit to")
    free = constants(known, Calibration())
    at = start or Calibration()
    for one in free:
        at = one.put(at, one.of(at))
    for _ in range(iterations):
        at = _Fit(known, predict, free).step(at)
    return _typical(at)


def _typical(at: Calibration) -> Calibration:
    """The same, with what chips that were not fitted take: the geometric means of those that were."""
    tables = {"matmul_default": at.matmul, "attention": at.attention_of}
    return at.changed(**{name: _mean_share(table) for name, table in tables.items() if table})


def _mean_share(table: Mapping[str, float]) -> float:
    return exp(sum(map(log, table.values())) / len(table))


def _weights(rows: Sequence[PublishedRun]) -> np.ndarray:
    """One over the square root of how many rows a publication has, in units of a typical error."""
    counts: dict[str, int] = {}
    for run in rows:
        counts[run.group] = counts.get(run.group, 0) + 1
    return np.array([1 / (TYPICAL * sqrt(counts[run.group])) for run in rows])


@dataclass(frozen=True)
class _Fit:
    """Rows, the model and the constants that are free."""

    rows: Sequence[PublishedRun]
    predict: PredictWith
    free: Sequence[Constant]

    def step(self, at: Calibration) -> Calibration:
        """One Gauss-Newton step from `at`."""
        errors = self.errors(at)
        return self.moved(at, errors, self.slopes(at, errors))

    def moved(self, at: Calibration, errors: np.ndarray, slopes: np.ndarray) -> Calibration:
        """Where the straight-line model of the errors is best, or part of the way there if that is better."""
        weights, spread = _weights(self.rows), np.array([one.spread for one in self.free])
        off = self._off(at)
        move = _best_move(errors, slopes, weights, off, spread)
        before = _loss(errors, weights, off, spread)
        for share in (1.0, 0.5, 0.25, 0.1):
            new = at
            for one, by in zip(self.free, move, strict=True):
                new = one.put(new, one.of(at) * exp(share * float(np.clip(by, -1, 1))))
            if _loss(self.errors(new), weights, self._off(new), spread) < before:
                return new
        return at

    def _off(self, at: Calibration) -> np.ndarray:
        """How far each constant is from its prior."""
        return np.array([log(one.of(at) / one.prior) for one in self.free])

    def errors(self, at: Calibration) -> np.ndarray:
        """Logarithms of predicted over published seconds."""
        return np.array([log(self.predict(run, at) / run.step_seconds()) for run in self.rows])

    def slopes(self, at: Calibration, errors: np.ndarray) -> np.ndarray:
        """How each row's error changes with the logarithm of each constant: small differences downwards."""
        found, step = np.zeros((len(self.rows), len(self.free))), 0.03
        for column, one in enumerate(self.free):
            lower = one.put(at, one.of(at) * exp(-step))
            for place, run in enumerate(self.rows):
                if one.concerns(run):
                    error = log(self.predict(run, lower) / run.step_seconds())
                    found[place, column] = (errors[place] - error) / step
        return found


def _best_move(
    errors: np.ndarray, slopes: np.ndarray, weights: np.ndarray, off: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """The move of the constants' logarithms with which errors + slopes x move, and the distances from the
    priors, are least; rows are weighted anew by the errors that are left."""
    move, prior = np.zeros(slopes.shape[1]), np.diag(1 / spread**2)
    for _ in range(12):
        robust = weights / np.maximum(np.abs(errors + slopes @ move), NOISE)
        normal = slopes.T @ (robust[:, None] * slopes) + prior
        move = -np.linalg.solve(normal, slopes.T @ (robust * errors) + off / spread**2)
    return move


def _loss(errors: np.ndarray, weights: np.ndarray, off: np.ndarray, spread: np.ndarray) -> float:
    """Absolute errors, squared near 0, and how far the constants are from their priors."""
    size = np.abs(errors)
    huber = np.where(size < NOISE, size**2 / (2 * NOISE) + NOISE / 2, size)
    return float((weights * huber).sum() + 0.5 * ((off / spread) ** 2).sum())


def held_out(
    rows: Sequence[PublishedRun], predict: PredictWith, start: Calibration, iterations: int = 2
) -> dict[str, Calibration]:
    """For each publication of `rows`, the calibration that is fitted to all the others.

    start: fitted to all rows; where the search begins. A chip that only the publication left out has takes
    what is typical of the others. iterations: the first shares its slopes among the publications.
    """
    known = [run for run in rows if not run.cannot]
    free = constants(known, Calibration())
    whole = _Fit(known, predict, free)
    errors = whole.errors(start)
    slopes = whole.slopes(start, errors)
    found = {}
    for group in dict.fromkeys(run.group for run in known):
        keep = np.array([run.group != group for run in known])
        others = [run for run in known if run.group != group]
        used = constants(others, Calibration())
        columns = np.array([place for place, one in enumerate(free) if one in used])
        begin = start.changed(
            matmul={one.key: one.of(start) for one in used if one.field == "matmul"},
            attention_of={one.key: one.of(start) for one in used if one.field == "attention_of"},
        )
        at = _Fit(others, predict, used).moved(begin, errors[keep], slopes[np.ix_(keep, columns)])
        found[group] = fit(others, predict, at, iterations - 1)
    return found
