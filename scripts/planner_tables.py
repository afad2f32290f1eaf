"""Write the tables of docs/planner-validation.md: the planner beside published runs, and its constants.

Run it inside .venv after scripts/planner_calibrate.py or a change of the planner; with --check it only says
whether they agree.
"""

import sys
from pathlib import Path

import made

from fmlab.planner.calibration import Calibration, fitted
from fmlab.planner.fit import constants
from fmlab.planner.fitted_file import fitted_on, label
from fmlab.planner.predicted import predict
from fmlab.planner.published import runs
from fmlab.planner.report import means, verdicts, why
from fmlab.planner.validate import by_group, compare

PATH = Path(__file__).resolve().parent.parent / "docs" / "planner-validation.md"
KNOWN = tuple(run for run in runs(fully_specified=True) if not run.cannot)


def errors() -> str:
    """Each publication in four ways."""
    rows = [
        "| Publication | Rows | FLOPs it reports | Calibrated | Held out | Constant | Constant, held out |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    found = verdicts()
    for one in found:
        ways = (one.calibrated, one.held_out, one.baseline, one.baseline_held_out)
        cells = " | ".join(f"{way.median:.0%} / {way.p90:.0%}" for way in ways)
        of = f"{one.calibrated.rows} of {one.calibrated.of}"
        rows.append(f"| {one.group} | {of} | {one.counts} | {cells} |")
    cells = " | ".join(f"**{median:.1%} / {p90:.1%}**" for median, p90 in means(found).values())
    covered = f"{len(KNOWN)} of {len(runs(fully_specified=True))}"
    rows.append(f"| **Mean of {len(found)} publications** | {covered} | | {cells} |")
    return "\n".join(rows)


def outliers() -> str:
    """Rows that are more than 10 % off, three of a publication at most."""
    rows = ["| Row | Predicted | Published | Error | What is known of it |", "|---|---:|---:|---:|---|"]
    for group in by_group(compare(predict, KNOWN), worst=3):
        for one in group.worst:
            if abs(one.error) > 0.1:
                times = f"{one.predicted:.3g} s | {one.published:.3g} s | {one.error:+.0%}"
                rows.append(f"| `{one.run.id}` | {times} | {why(one.run)} |")
    return "\n".join(rows)


def fitted_constants() -> str:
    """Every constant: its value, its prior, and what it was fitted on."""
    rows = ["| Constant | Value | Prior | Fitted on |", "|---|---:|---:|---|"]
    used = fitted_on()
    for one in constants(KNOWN, Calibration()):
        value, prior = f"{one.of(fitted()):.3g}", f"{one.prior:.3g}"
        rows.append(f"| `{label(one)}` | {value} | {prior} | {used[label(one)]} |")
    return "\n".join(rows)


def left_out() -> str:
    """Fully specified rows that are not predicted."""
    rows = ["| Rows | Why not | Which |", "|---:|---|---|"]
    left = [run for run in runs(fully_specified=True) if run.cannot]
    for reason in dict.fromkeys(run.cannot for run in left):
        ids = [f"`{run.id}`" for run in left if run.cannot == reason]
        rows.append(f"| {len(ids)} | {reason} | {', '.join(ids[:3])}{', …' if len(ids) > 3 else ''} |")
    return "\n".join(rows)


def generated(text: str) -> str:
    """`text` with its tables made anew."""
    parts = {
        "errors": errors(),
        "outliers": outliers(),
        "constants": fitted_constants(),
        "left out": left_out(),
    }
    return made.filled(text, parts, "planner_tables.py")


if __name__ == "__main__":
    sys.exit(made.main(PATH, generated(PATH.read_text()), "planner_tables.py", sys.argv[1:]))
