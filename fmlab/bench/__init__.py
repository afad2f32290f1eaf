"""Benchmarks: every speed that fmlab promises, measured as ratios inside one run.

Machines differ, and the same machine differs from minute to minute, so a promise is a ratio between two
things timed alternately (`interleaved`), reported as the median with its spread. A benchmark is a function
`run(quick: bool) -> Iterable[Result]`, named in `BENCHES`; best a generator, since `fmlab bench` prints a
line as each result comes, and the table at the end.
"""

import operator
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["BENCHES", "Ratio", "Result", "interleaved", "main"]

#: name on the command line -> "module:function"; imported only when asked for
BENCHES: dict[str, str] = {
    "gpt-step": "fmlab.bench.gpt_step:run",
    "family-step": "fmlab.bench.family_step:run",
    "trainers": "fmlab.bench.trainers:run",
    "generation": "fmlab.bench.generation:run",
    "checkpoint": "fmlab.bench.checkpoint:run",
    "recovery": "fmlab.bench.recovery:run",
    "ddp": "fmlab.bench.ddp:run",
    "parallel": "fmlab.bench.parallel:run",
    "collectives": "fmlab.bench.collectives:run",
    "ranks": "fmlab.bench.ranks:run",
    "flight": "fmlab.bench.flight:run",
    "chip": "fmlab.bench.chip:run",
    "sim-device": "fmlab.bench.sim_device:run",
    "dry-run": "fmlab.bench.dry_run:run",
    "planner": "fmlab.bench.planner:run",
    "kernels": "fmlab.bench.kernels:run",
    "compile": "fmlab.bench.compile:run",
    "notebooks": "fmlab.bench.notebooks:run",
}

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Result:
    """One line of a benchmark.

    `unit` is "x" for a ratio, else a physical unit ("s", "ms", "MB"). `target` is "" (a plain observation) or
    a bound on `value` such as ">= 1.15". `kind` says where the number comes from. `detail` is free text: the
    spread, the shapes, the two sides of a ratio.

    Raises ValueError when `target` is not a bound.
    """

    name: str
    value: float
    unit: str
    target: str = ""
    kind: Literal["measured", "modelled", "quoted"] = "measured"
    detail: str = ""

    def __post_init__(self) -> None:
        if self.target:
            _parse_bound(self.target)

    @property
    def met(self) -> bool | None:
        """Whether `value` keeps to `target`; None when there is no target."""
        if not self.target:
            return None
        compare, bound = _parse_bound(self.target)
        return bool(compare(self.value, bound))


def _parse_bound(target: str) -> tuple[Callable[[float, float], bool], float]:
    match = re.fullmatch(r"\s*(>=|<=|>|<)\s*([0-9.]+(?:e-?[0-9]+)?)\s*", target)
    if match is None:
        raise ValueError(f"target {target!r} is not a bound; write one like '>= 1.15' or '<= 3'")
    return _COMPARE[match[1]], float(match[2])


@dataclass(frozen=True)
class Ratio:
    """How many times faster one side is than the other, over pairs of runs timed back to back.

    All fields but the last two are ratios time(b) / time(a): above 1, `a` is the faster side.
    """

    median: float
    low: float
    lower_quartile: float
    upper_quartile: float
    high: float
    pairs: int
    seconds_a: float  # median time of one run of a
    seconds_b: float  # median time of one run of b

    @classmethod
    def of(cls, seconds_a: Sequence[float], seconds_b: Sequence[float]) -> "Ratio":
        """From times taken elsewhere (inside ranks, say): pair i is (seconds_a[i], seconds_b[i])."""
        if len(seconds_a) != len(seconds_b) or len(seconds_a) < 2:
            raise ValueError(
                f"got {len(seconds_a)} times for a and {len(seconds_b)} for b; "
                "give two lists of the same length, at least 2"
            )
        ratios = sorted(b / a for a, b in zip(seconds_a, seconds_b, strict=True))
        lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(
            median=statistics.median(ratios),
            low=ratios[0],
            lower_quartile=lower,
            upper_quartile=upper,
            high=ratios[-1],
            pairs=len(ratios),
            seconds_a=statistics.median(seconds_a),
            seconds_b=statistics.median(seconds_b),
        )

    def __str__(self) -> str:
        return (
            f"{self.median:.2f}x (quartiles {self.lower_quartile:.2f}..{self.upper_quartile:.2f}, "
            f"range {self.low:.2f}..{self.high:.2f}, {self.pairs} pairs; "
            f"{self.seconds_a:.3g} s against {self.seconds_b:.3g} s)"
        )


def interleaved(a: Callable[[], object], b: Callable[[], object], pairs: int = 10, warmup: int = 1) -> Ratio:
    """Time `a` and `b` alternately and return the ratio time(b) / time(a) of each pair, with its spread.

    Both sides run `warmup` times untimed first. The order inside a pair alternates, so that a machine that
    slows down (or a cache that the first side warms) favours neither. Whatever the two start on a device they
    must wait for: only the time until the call returns is counted.
    """
    if pairs < 2:
        raise ValueError(f"pairs={pairs}: a spread needs at least 2 pairs")
    for _ in range(warmup):
        a()
        b()
    seconds_a, seconds_b = [], []
    for pair in range(pairs):
        if pair % 2 == 0:
            seconds_a.append(_seconds(a))
            seconds_b.append(_seconds(b))
        else:
            seconds_b.append(_seconds(b))
            seconds_a.append(_seconds(a))
    return Ratio.of(seconds_a, seconds_b)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(argv: list[str]) -> int:
    """`fmlab bench`; see fmlab.bench.command."""
    from fmlab.bench.command import main as command

    return command(argv)
