"""calibration.toml: what was fitted, to how many rows, and what is fitted when a publication is left out.

scripts/planner_calibrate.py writes it; fmlab.planner.calibration.fitted() reads the first part.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from fmlab.planner.calibration import FILE, Calibration
from fmlab.planner.fit import Constant
from fmlab.planner.published import PublishedRun

TABLES = ("matmul", "attention_of")
DIGITS = 4

HEAD = """# What the planner was fitted to published runs with; scripts/planner_calibrate.py writes this file.
# [calibration]: fitted to all publications. [priors]: what each constant would be without the record.
# [fitted_on]: rows and publications that each constant's value can depend on.
# [held_out."…"]: fitted to all publications but this one: how well the planner does on what it has not seen.
"""


@cache
def held_out_calibrations() -> dict[str, Calibration]:
    """Publication -> what is fitted to all the others. Raises ValueError where the file has none."""
    found = _read().get("held_out", {})
    if not found:
        raise ValueError(f"{FILE} has no [held_out]: run python scripts/planner_calibrate.py")
    return {group: Calibration().changed(**values) for group, values in found.items()}


@cache
def _read() -> dict[str, dict[str, dict[str, float]]]:
    where = files("fmlab.planner").joinpath(FILE)
    if not where.is_file():
        raise ValueError(f"{FILE} is not there: run python scripts/planner_calibrate.py")
    found: dict[str, dict[str, dict[str, float]]] = tomllib.loads(where.read_text("utf-8"))
    return found


def priors() -> Mapping[str, float]:
    """Constant -> its value without the record."""
    return _read()["priors"]  # type: ignore[return-value]


def fitted_on() -> Mapping[str, str]:
    """Constant -> the rows and publications that it was fitted on."""
    return _read()["fitted_on"]  # type: ignore[return-value]


def text(
    fitted: Calibration,
    apart: Mapping[str, Calibration],
    free: Sequence[Constant],
    rows: Sequence[PublishedRun],
) -> str:
    """The file's text. free: the constants that were fitted."""
    known = [run for run in rows if not run.cannot]
    lines = [HEAD, *_table("calibration", fitted, free)]
    lines += ["[priors]", *(f'"{label(one)}" = {one.prior:.{DIGITS}g}' for one in free), ""]
    lines.append("[fitted_on]")
    for one in free:
        used = [run for run in known if one.concerns(run)]
        groups = list(dict.fromkeys(run.group for run in used))
        of = groups[0] if len(groups) == 1 else f"{len(groups)} publications"
        lines.append(f'"{label(one)}" = "{len(used)} rows of {of}"')
    lines.append("")
    for group, calibration in apart.items():
        lines += _table(f'held_out."{group}"', calibration, free)
    return "\n".join(lines).rstrip("\n") + "\n"


def label(one: Constant) -> str:
    """A name for a constant: its field, and the chip and dtype."""
    return f"{one.field} {one.key}".strip()


def _table(name: str, calibration: Calibration, free: Sequence[Constant]) -> list[str]:
    plain = [*(one.field for one in free if not one.key), "matmul_default", "attention"]
    lines = [f"[{name}]", *(f"{one} = {getattr(calibration, one):.{DIGITS}g}" for one in plain), ""]
    for field in TABLES:
        entries = getattr(calibration, field)
        lines.append(f"[{name}.{field}]")
        lines += [f'"{key}" = {entries[key]:.{DIGITS}g}' for key in sorted(entries)]
        lines.append("")
    return lines
