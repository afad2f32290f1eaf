"""Checkers of notebook 3.7."""

import math
import random

from fmlab.lab.exercises import Answer, NotYet, exercise

CPU = [7.63, 7.41, 7.20, 7.02, 6.90, 6.77, 6.71, 6.60, 6.52, 6.47]
STEADY = [41.0, 9.0, 1.3, 0.50, 0.52, 0.49, 0.51, 0.50, 0.53, 0.50]

#: (what came back: losses, seconds, planned; the reasons; what to say first and then)
PORTS: tuple[tuple[list[float], list[float], float, list[str], str, str], ...] = (
    (
        [loss * 1.004 for loss in CPU], STEADY, 0.45, [],
        "the first steps compile: they say nothing of the speed",
        "the median is that of seconds[3:]",
    ),
    (
        [*CPU[:6], *(loss * 0.97 for loss in CPU[6:])], STEADY, 0.45, ["losses"],
        "a loss that is too low is as wrong as one too high",
        "compare abs(chip - cpu) with 1 % of the CPU's, step by step",
    ),
    (
        [*CPU[:9], math.nan], STEADY, 0.45, ["losses"],
        "a loss that is no number is not within 1 %",
        "`not abs(b - a) <= limit` is true for NaN, `abs(b - a) > limit` is not",
    ),
    (
        CPU[:4], STEADY, 0.45, ["losses"],
        "losses that never came are missing",
        "zip stops at the shorter list: compare the lengths too",
    ),
    (
        CPU, [*STEADY[:3], *(3 * s for s in STEADY[3:])], 0.45, ["slow"],
        "three times the plan is slow",
        "median above 1.3 x planned",
    ),
    (
        CPU, [*STEADY[:5], 44.0, *STEADY[6:]], 0.45, ["recompile"],
        "a single step of 44 seconds is another program, not a slow chip",
        "a mean is pulled up by it, the median is not: compare the largest with 5 x the median",
    ),
    (
        CPU, [30.0, 2.0, 1.0, 0.4, 0.4, 0.8, 0.8], 0.47, [],
        "of an even number of steps, the median is the mean of the two in the middle",
        "(0.4 + 0.8) / 2, not 0.8",
    ),
    (
        [loss + 0.2 for loss in CPU], [*STEADY[:3], 2.0, 2.1, 60.0, 2.0], 0.45,
        ["losses", "slow", "recompile"],
        "there may be more than one reason",
        "collect them in the order of the docstring",
    ),
)  # fmt: skip


@exercise("3.7.1", "accept the port, or say why not", returns=list)
def refuse(answer: Answer) -> str:
    for chip, seconds, planned, right, hint, more in PORTS:
        got = answer(list(CPU), list(chip), list(seconds), planned)
        if got != right:
            what = f"got {got} where {', '.join(right) or 'nothing'} is to be said"
            raise NotYet(what, hint, more)
    return f"{len(PORTS)} ports, one of them sound though its first step took 41 s"


@exercise("3.7.2", "at what utilisation does another chip pay?", returns=float)
def break_even(answer: Answer) -> str:
    rng = random.Random(372)
    for _ in range(6):
        step, mine, theirs = rng.uniform(0.5, 20), rng.uniform(20, 900), rng.uniform(20, 900)
        flops, peak = rng.uniform(1e15, 1e18), rng.uniform(1e15, 1e17)
        got = answer(step, mine, flops, peak, theirs)
        right = flops * theirs / (peak * step * mine)
        if math.isclose(got, right, rel_tol=1e-6):
            continue
        raise _wrong_utilisation(got, right, mine / theirs)
    return "6 pairs of chips; dearer ones have to be fuller"


def _wrong_utilisation(got: float, right: float, prices: float) -> NotYet:
    what = f"got {got:.4g}, and at that the two steps do not cost the same"
    slips = {
        right * prices: ("the price of an hour is not in it", "seconds x price is the same on both sides"),
        right * prices**2: ("the dearer chip has to be fuller, not emptier", "price goes up, not down"),
        1 / right: ("upside down", "FLOPs over (peak x utilisation) are the seconds of a step there"),
    }
    for value, hints in slips.items():
        if math.isclose(got, value, rel_tol=1e-6):
            return NotYet(what, *hints)
    return NotYet(
        what,
        "write down what a step costs on both sides and set them equal",
        "step_seconds x usd_per_hour = flops / (peak x utilisation) x price",
    )


@exercise("3.7.3", "when is the port paid?")
def runs_until_paid(answer: Answer) -> str:
    cases: tuple[tuple[float, float, float, float, int | None, str, str], ...] = (
        (100.0, 50.0, 30.0, 0.0, 5, "five runs save 20 each", "porting over what a run saves"),
        (101.0, 50.0, 30.0, 0.0, 6, "a part of a run saves nothing", "round up to a whole run"),
        (100.0, 50.0, 60.0, 0.0, None, "runs that cost more never pay", "None where nothing is saved"),
        (100.0, 50.0, 50.0, 0.0, None, "runs that cost the same never pay", "saved == 0 divides by zero"),
        (100.0, 50.0, 40.0, 0.25, None, "what fails is paid twice", "there x (1 + failed)"),
        (90.0, 50.0, 40.0, 0.025, 10, "what fails is paid twice", "there x (1 + failed)"),
        (0.0, 50.0, 60.0, 0.0, 0, "a port that costs nothing is paid at once", "ask for it first"),
    )
    for porting, here, there, failed, right, hint, more in cases:
        got = answer.call_unchecked(porting, here, there, failed)  # None is an answer here
        if got != right or isinstance(got, bool):
            what = f"got {got} for a port of {porting:g}, runs of {here:g} and {there:g}, {failed:.1%} again"
            raise NotYet(what, hint, more)
    return f"{len(cases)} ports, three of which never pay"
