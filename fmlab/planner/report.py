"""The validation report: each publication's errors, calibrated and held out, beside a simple baseline.

    print(report())                          what `fmlab plan validate` prints
    tables()                                 the same numbers as rows, for docs/planner-validation.md

*Calibrated*: the constants were fitted to all publications. *Held out*: to all but the one that is judged,
so that nothing of it was seen; they are kept in calibration.toml. The baseline, one constant utilisation for
each chip, is fitted and held out in the same way.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

from fmlab.planner.calibration import Calibration, fitted
from fmlab.planner.fitted_file import held_out_calibrations
from fmlab.planner.predicted import predict
from fmlab.planner.published import PublishedRun, runs
from fmlab.planner.validate import Compared, GroupErrors, by_group, compare, constant_utilisation

#: What is known of the rows that are furthest off, by the beginning of their ids.
EXPLAINED = {
    "sc21-3.6B": "scores of 16 rows at once: all kernels of unfused attention share a constant",
    "sc21-7.5B": "scores of 16 rows at once: all kernels of unfused attention share a constant",
    "mpt-140": "2 rows a GPU: gathers of weights hide worse than modelled; its network is not published",
    "mpt-020": "2 rows a GPU: gathers of weights hide worse than modelled",
    "mpt-079": "2 rows a GPU: gathers of weights hide worse than modelled",
    "mpt-031": "2 rows a GPU: gathers of weights hide worse than modelled",
    "mpt-032": "2 rows a GPU: gathers of weights hide worse than modelled",
    "mpt-089": "2 rows a GPU: gathers of weights hide worse than modelled",
    "mpt-080": "unknown: its neighbour with rows of half the length is 31 % faster by TFLOP/s (160, not 122)",
    "mpt-121": "unknown: its neighbours with longer rows are 24 % faster by TFLOP/s (174, not 140)",
    "mpt-179": "out of line with its neighbours on 16 and 64 GPUs (173, 141 and 172 TFLOP/s)",
    "mpt-07": "fp8 of 2023, on the constants of later publications' fp8",
    "titan-4": "mostly attention, on long rows: how context ranks share it is not printed",
    "titan-5": "mostly attention, on long rows: how context ranks share it is not printed",
    "titan-6": "mostly attention, on long rows: how context ranks share it is not printed",
    "titan-2": "8 tensor ranks on a hidden width of 4,096: narrow matrices, and all messages waited for",
    "mbridge-206": "the cell has two precisions; the first is taken",
    "mbridge-": "containers of other months give the same layout times that differ by up to 10 %",
    "maxtext-v5e": "many slices: how the data-centre network slows with their number is not modelled",
    "maxtext-v5p-512b": "computes less again than all, it seems: the policy is not printed",
    "recipe-trillium-Llama3.1-405B": "two pods; activations go to the host's memory, which is not modelled",
    "bigsci-": "DeepSpeed of 2022 on the constants of other A100 code; worst with 1 or 2 rows at once",
    "korth-": "SC'21's chips and model a year later: 10 % faster code, and one rate for both",
    "nvbert-": "kernels of 2021 for short rows",
    "trn1-": "two rows of two tutorials, on a chip that no other row has",
    "nemo2412-LLAMA2-13B-SFT": "virtual stages are not printed for fine-tuning: 1 is assumed",
    "nemo2412-": "the chip is not named; fp8 rates are shared with later software",
}


@dataclass(frozen=True)
class Verdict:
    """Errors of one publication in four ways. `counts`: how its own FLOPs are counted, "" where unknown."""

    group: str
    counts: str
    calibrated: GroupErrors
    held_out: GroupErrors
    baseline: GroupErrors
    baseline_held_out: GroupErrors


def why(run: PublishedRun) -> str:
    """What is known of a row's error; empty where nothing is."""
    fits = [begins for begins in EXPLAINED if run.id.startswith(begins)]
    return EXPLAINED[max(fits, key=len)] if fits else ""


@cache
def verdicts() -> tuple[Verdict, ...]:
    """Each publication's errors, in the order of the record."""
    known = tuple(run for run in runs(fully_specified=True) if not run.cannot)
    apart = held_out_calibrations()
    constant = constant_utilisation(known)
    others = {
        group: constant_utilisation([run for run in known if run.group != group])
        for group in dict.fromkeys(run.group for run in known)
    }
    ways = (
        by_group(compare(predict, known)),
        by_group(compare(lambda run: predict(run, apart[run.group]), known)),
        by_group(compare(constant, known)),
        by_group(compare(lambda run: others[run.group](run), known)),
    )
    return tuple(Verdict(four[0].group, counts(four[0].group), *four) for four in zip(*ways, strict=True))


def counts(group: str) -> str:
    """How a publication counts FLOPs, where it reports any."""
    found = {str(run.convention) for run in runs(group=group) if run.convention and (run.tflops or run.mfu)}
    return ", ".join(sorted(found)) or "times only"


def means(found: Sequence[Verdict]) -> dict[str, tuple[float, float]]:
    """Of each way: the mean over publications of medians, and of 90th percentiles."""
    return {
        way: (
            mean(getattr(one, way).median for one in found),
            mean(getattr(one, way).p90 for one in found),
        )
        for way in ("calibrated", "held_out", "baseline", "baseline_held_out")
    }


def report(details: bool = False) -> str:
    """The whole table as text. details: every row instead of the worst ones."""
    found = verdicts()
    lines = [
        "errors of the step time, |predicted / published - 1|: median and 90th percentile of a publication",
        f"{'':38}{'':>11}  {'calibrated':>15} {'held out':>15} {'constant':>15} {'its held out':>15}",
    ]
    for one in found:
        cells = (one.calibrated, one.held_out, one.baseline, one.baseline_held_out)
        numbers = " ".join(f"{cell.median:7.1%} {cell.p90:7.1%}" for cell in cells)
        lines.append(
            f"{one.group[:38]:38}{one.calibrated.rows:4} of {one.calibrated.of:<4} {numbers}   {one.counts}"
        )
    numbers = " ".join(f"{median:7.1%} {p90:7.1%}" for median, p90 in means(found).values())
    rows, of = sum(one.calibrated.rows for one in found), len(runs(fully_specified=True))
    lines.append(f"{f'mean of {len(found)} publications':38}{rows:4} of {of:<4} {numbers}")
    known = [run for run in runs(fully_specified=True) if not run.cannot]
    for group in by_group(compare(predict, known), worst=10**6 if details else 3):
        lines += ["", group.group, *map(_line, group.worst)]
    left = [run for run in runs(fully_specified=True) if run.cannot]
    lines += ["", f"{len(left)} fully specified rows are not predicted:"]
    for reason in dict.fromkeys(run.cannot for run in left):
        ids = [run.id for run in left if run.cannot == reason]
        lines.append(f"  {len(ids):3}  {reason} ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''})")
    return "\n".join(lines)


def _line(one: Compared) -> str:
    note = why(one.run)
    return (
        f"  {one.run.id:40} predicted {one.predicted:10.4g} s  published {one.published:10.4g} s  "
        f"{one.error:+7.1%}{'  ' + note if note and abs(one.error) > 0.1 else ''}"
    )


def of_file(path: Path, calibration: Calibration) -> str:
    """Predictions of the rows of another file with the same columns, by publication."""
    rows = runs(path=path)
    found: list[Compared] = []
    left = [(run, run.cannot) for run in rows if run.cannot]
    for run in rows:
        if not run.cannot:
            try:
                found += compare(lambda one: predict(one, calibration), [run])
            except ValueError as error:  # a layout that the planner refuses
                left.append((run, str(error)))
    if not found:
        raise ValueError(
            f"{path} has no row that can be predicted: {'; '.join(sorted({w for _, w in left}))}"
        )
    lines = [f"{len(found)} of {len(rows)} rows"]
    for group in by_group(found, worst=len(found)):
        lines += ["", str(group), *map(_line, group.worst)]
    lines += ["", *(f"not predicted: {run.id}: {reason}" for run, reason in left if run.fully_specified)]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run `fmlab plan validate …`. Raises ValueError for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="fmlab plan validate", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every row, not only each publication's worst")
    parser.add_argument("--runs", type=Path, help="another file with the columns of data/published/runs.csv")
    parser.add_argument("--defaults", action="store_true", help="with --runs: uncalibrated")
    args = parser.parse_args(argv)
    if args.defaults and args.runs is None:
        raise ValueError("--defaults is for another file: give --runs FILE too")
    if args.runs is not None:
        print(of_file(args.runs, Calibration() if args.defaults else fitted()))
    else:
        print(report(details=args.all))
    return 0
