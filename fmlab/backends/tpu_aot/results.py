"""The results of `fmlab aot` that come with the package, for those who do not compile themselves."""

import csv
from pathlib import Path

PATH = Path(__file__).with_name("results.csv")


def results() -> list[dict[str, str]]:
    """The rows of results.csv: model, batch, target, outcome, hbm_bytes, versions, date, command, …

    "outcome" is "compiled", or the compiler's sentence when the step does not fit.
    """
    with PATH.open(newline="") as file:
        return list(csv.DictReader(file))
