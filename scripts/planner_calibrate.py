"""Fit the planner's constants to the published record, and write fmlab/planner/calibration.toml.

Run it inside .venv after a change of the record or of the planner's formulas; it takes some minutes, for the
constants are fitted once to all publications and once without each. Then run scripts/planner_tables.py.
"""

from pathlib import Path

from fmlab.planner.calibration import FILE, Calibration
from fmlab.planner.fit import constants, fit, held_out
from fmlab.planner.fitted_file import text
from fmlab.planner.predicted import predict
from fmlab.planner.published import runs

PATH = Path(__file__).resolve().parent.parent / "fmlab" / "planner" / FILE

if __name__ == "__main__":
    rows = [run for run in runs(fully_specified=True) if not run.cannot]
    fitted = fit(rows, predict, iterations=5)
    apart = held_out(rows, predict, fitted, iterations=1)
    PATH.write_text(text(fitted, apart, constants(rows, Calibration()), rows), encoding="utf-8")
    print(f"wrote {PATH.name}: {len(rows)} rows of {len(apart)} publications")
