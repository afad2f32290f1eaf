"""A scaling law: the loss after training as a function of parameters N and tokens D, fitted to runs.

    L(N, D) = E + A / N^alpha + B / D^beta

E is what no model removes, the second term what a small model loses, the third what little text loses
(Hoffmann et al. 2022, arXiv:2203.15556, section 3.3). The fit is their third approach: with a = log A, b =
log B, e = log E,

    minimise  sum over runs of  Huber(logsumexp(a - alpha log N, b - beta log D, e) - log L)

by L-BFGS from many starting points, Huber's delta 1e-3, which keeps a run that went astray from bending the
curve. Besiroglu et al. (2024, arXiv:2404.10102) refitted their points: the printed constants come from a
search that stopped too early, and the printed intervals are far too narrow. So here the objective is a sum
(a mean is so flat that a search believes itself done), and the intervals come from fits to runs drawn again
with replacement.

Needs scipy, which comes with the extra `data`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmlab.extras import require

Floats = NDArray[np.float64]

DELTA = 1e-3
#: Starting points of (a, alpha), (b, beta) and e, as in the paper's appendix D.3, on a coarser grid.
LOGS, POWERS, FLOORS = (0.0, 5.0, 10.0, 15.0), (0.0, 0.25, 0.5, 1.0), (-1.0, 0.0, 1.0)
TRIED = 6  # the best of them, from which L-BFGS starts
LEAST = 6  # runs: one more than the law has constants


@dataclass(frozen=True)
class ScalingLaw:
    """Constants of the law; N and D as they were counted in the fit, the loss in nats a token."""

    floor: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """The law's loss of so many parameters and tokens: numbers, or arrays that broadcast."""
        n, d = _above_zero("parameters", parameters), _above_zero("tokens", tokens)
        found = self.floor + self.A * n**-self.alpha + self.B * d**-self.beta
        return float(found) if found.ndim == 0 else found

    def best_split(self, flops: float) -> tuple[float, float]:
        """(parameters, tokens) whose loss is least where 6 N D FLOPs are to be spent (their equation 4)."""
        spent = float(_above_zero("flops", flops)) / 6
        g = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        n = g * spent ** (self.beta / (self.alpha + self.beta))
        return n, spent / n

    def __str__(self) -> str:
        size, text = f"{self.A:.3g} / N^{self.alpha:.3f}", f"{self.B:.3g} / D^{self.beta:.3f}"
        return f"{self.floor:.2f} + {size} + {text} nats a token"


def fit_law(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """The law that fits these runs best, [runs] each.

    Raises ValueError for fewer than 6 runs, fewer than 3 different sizes or amounts of text, for numbers
    that are not above 0, and for lists of unequal length; ImportError without scipy.
    """
    runs = _runs(parameters, tokens, losses)
    starts = [
        np.array([a, alpha, b, beta, e])
        for a, alpha, b, beta, e in product(LOGS, POWERS, LOGS, POWERS, FLOORS)
    ]
    starts.sort(key=lambda x: _objective(x, runs)[0])
    # The best starts resemble each other: take every so many of the better half.
    chosen = starts[: len(starts) // 2 : len(starts) // (2 * TRIED)]
    fits = [_minimise(start, runs) for start in chosen]
    return _law(min(fits, key=lambda fit: fit[0])[1])


def bootstrap(
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    resamples: int = 100,
    seed: int = 0,
) -> list[ScalingLaw]:
    """The law fitted to the runs drawn again with replacement, so many times: how sure the constants are.

    Draws that leave fewer than 3 sizes or amounts of text are drawn again. Raises as fit_law, and ValueError
    for resamples below 1.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    runs = _runs(parameters, tokens, losses)
    best = _logs(fit_law(parameters, tokens, losses))
    draw = np.random.default_rng(seed)
    laws: list[ScalingLaw] = []
    while len(laws) < resamples:
        again = runs[:, draw.integers(runs.shape[1], size=runs.shape[1])]
        if _too_few_kinds(again):
            continue
        laws.append(_law(_minimise(best, again)[1]))
    return laws


def interval(
    laws: Sequence[ScalingLaw], of: Callable[[ScalingLaw], float], share: float = 0.8
) -> tuple[float, float]:
    """The middle `share` of what the laws of a bootstrap say: interval(laws, lambda law: law.alpha)."""
    if not 0 < share < 1:
        raise ValueError(f"share must be above 0 and below 1, got {share}")
    low, high = np.quantile([of(law) for law in laws], [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _objective(x: Floats, runs: Floats) -> tuple[float, Floats]:
    """The sum to minimise at x = (a, alpha, b, beta, e), and its gradient; runs [3, n]: logs of N, D, L."""
    a, alpha, b, beta, e = x
    log_n, log_d, log_loss = runs
    terms = np.stack([a - alpha * log_n, b - beta * log_d, np.full_like(log_n, e)])
    top = terms.max(0)
    parts = np.exp(terms - top)
    weight = parts / parts.sum(0)  # what each term contributes to the loss
    off = top + np.log(parts.sum(0)) - log_loss
    near = np.abs(off) <= DELTA
    value = np.where(near, off**2 / 2, DELTA * (np.abs(off) - DELTA / 2)).sum()
    slope = np.where(near, off, DELTA * np.sign(off)) * weight  # [3, runs]
    capacity, text, floor = slope
    gradient = [
        capacity.sum(),
        -(capacity * log_n).sum(),
        text.sum(),
        -(text * log_d).sum(),
        floor.sum(),
    ]
    # Values of 1e-4 and less would end the search at once, so both are scaled.
    return float(value) / DELTA, np.array(gradient) / DELTA


def _minimise(start: Floats, runs: Floats) -> tuple[float, Floats]:
    optimize = require("data", "scipy.optimize")
    bounds = [(-10, 40), (0, 3), (-10, 40), (0, 3), (-10, 3)]  # no negative power, no floor above 20 nats
    found = optimize.minimize(
        _objective,
        np.asarray(start, dtype=np.float64),
        args=(runs,),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 400, "ftol": 1e-12, "gtol": 1e-8},
    )
    return float(found.fun), np.asarray(found.x)


def _law(x: Floats) -> ScalingLaw:
    a, alpha, b, beta, e = map(float, x)
    return ScalingLaw(float(np.exp(e)), float(np.exp(a)), alpha, float(np.exp(b)), beta)


def _logs(law: ScalingLaw) -> Floats:
    return np.array([np.log(law.A), law.alpha, np.log(law.B), law.beta, np.log(law.floor)])


def _runs(*columns: Sequence[float]) -> Floats:
    """Logs of N, D and L, [3, runs], checked."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise ValueError("{} parameters, {} tokens, {} losses: give one of each a run".format(*lengths))
    if lengths[0] < LEAST:
        raise ValueError(f"{lengths[0]} runs for a law of 5 constants; give {LEAST} or more")
    named = zip(("parameters", "tokens", "losses"), columns, strict=True)
    runs = np.log(np.stack([_above_zero(name, column) for name, column in named]))
    if _too_few_kinds(runs):
        raise ValueError(
            "a law needs 3 different sizes and 3 different amounts of text, or its powers are free"
        )
    return runs


def _too_few_kinds(runs: Floats) -> bool:
    return min(len(np.unique(runs[0])), len(np.unique(runs[1]))) < 3


def _above_zero(name: str, values: Any) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise ValueError(f"{name} must be above 0 and finite, got {values}")
    return found
