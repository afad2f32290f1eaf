"""How much of a long run's time is training: failures, checkpoints, and the best interval between them.

A run of many chips is interrupted when any of them fails. Failures come without memory (a Poisson process),
so that the mean time between those of a run is that of one chip divided by the number of chips. What was done
since the last checkpoint is done again.

    failures = Failures(chip_hours=50_677)              one failure in so many hours of a chip
    failures.mean_hours(16_384)                         3.1: hours between two of a run of so many chips
    optimal_interval(checkpoint=300, mean_time=86_400)  seconds of training between two checkpoints
    goodput_at(interval=7_000, checkpoint=300, restart=600, mean_time=86_400).share

Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9): sqrt(2 δ M).
Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22: the expected time of a run with restarts, and a closer approximation to its best
interval.
"""

import math
from dataclasses import dataclass
from typing import Literal

from fmlab.parallel.values import above_zero, whole


@dataclass(frozen=True)
class Failures:
    """How often one chip, with its share of host and network, ends a run: once in `chip_hours`."""

    chip_hours: float
    source: str = "given"

    def __post_init__(self) -> None:
        above_zero(self.chip_hours, f"Failures(chip_hours={self.chip_hours!r})", "give hours above 0")

    def mean_hours(self, chips: int) -> float:
        """Hours between two failures of a run of so many chips."""
        return self.chip_hours / whole(chips, f"chips={chips!r}")

    def mean_seconds(self, chips: int) -> float:
        return 3600 * self.mean_hours(chips)


#: 419 unexpected interruptions of 16,384 H100 in 54 days.
LLAMA3 = Failures(
    54 * 24 * 16_384 / 419,
    "Llama 3 (arXiv:2407.21783), section 3.3.4: 419 unexpected interruptions of 16,384 H100 in 54 days",
)


def optimal_interval(checkpoint: float, mean_time: float, method: Literal["daly", "young"] = "daly") -> float:
    """Seconds of training between two checkpoints at which a run is done soonest.

    checkpoint: seconds for which training stands still while one is written. mean_time: seconds between two
    failures of the run. "young": the first-order estimate; "daly": of higher order, right also where failures
    are frequent. Raises ValueError for what is not above 0 and for an unknown method.
    """
    delta = above_zero(checkpoint, f"checkpoint={checkpoint!r}", "give seconds above 0")
    mean = above_zero(mean_time, f"mean_time={mean_time!r}", "give seconds above 0")
    if method == "young":
        return math.sqrt(2 * delta * mean)
    if method != "daly":
        raise ValueError(f"method={method!r}: legal are daly, young")
    if delta >= 2 * mean:
        return mean
    ratio = delta / (2 * mean)
    return math.sqrt(2 * delta * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta


@dataclass(frozen=True)
class Goodput:
    """share: of the run's time in which new training is done. The parts of the rest, each as a share:
    checkpoints: writing them; lost: work done twice, and restarts."""

    share: float
    checkpoints: float
    lost: float

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} training, {self.checkpoints:.1%} checkpoints, {self.lost:.1%} lost to failures"
        )


def goodput_at(interval: float, checkpoint: float, mean_time: float, restart: float = 0.0) -> Goodput:
    """The share of time that is training, from the expected time of a run (Daly 2006).

    A segment of `interval` seconds of training and one checkpoint succeeds when no failure falls into it;
    after one that fails come `restart` seconds, in which failures fall too. The expected time of a segment is
    M e^(restart/M) (e^((interval + checkpoint)/M) - 1), with M = mean_time; all in seconds.
    Raises ValueError for what is not above 0 (restart: below 0).
    """
    length = above_zero(interval, f"interval={interval!r}", "give seconds above 0")
    delta = above_zero(checkpoint, f"checkpoint={checkpoint!r}", "give seconds above 0")
    mean = above_zero(mean_time, f"mean_time={mean_time!r}", "give seconds above 0")
    if isinstance(restart, bool) or not 0 <= restart < math.inf:
        raise ValueError(f"restart={restart!r}: give seconds, 0 or more")
    exponent = (length + delta) / mean
    if exponent + restart / mean > 700:
        raise ValueError(
            f"an interval of {length:g} s with a failure every {mean:g} s: such a segment never ends; "
            f"checkpoint more often, every {optimal_interval(delta, mean):.3g} s"
        )
    expected = mean * math.exp(restart / mean) * math.expm1(exponent)
    return Goodput(length / expected, delta / expected, 1 - (length + delta) / expected)
