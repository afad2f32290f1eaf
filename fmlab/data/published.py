"""Numbers that others published, each with its source: quoted in the notebooks, never computed here."""

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class PublishedModel:
    """A model as its paper presents it: parameters as printed there, the month of its first version."""

    name: str
    month: str
    parameters: float
    source: str

    @property
    def years(self) -> float:
        """The month as a number of years: 2018.75 for October 2018."""
        year, month = self.month.split("-")
        return int(year) + (int(month) - 1) / 12


def model_growth() -> list[PublishedModel]:
    """The largest dense language models from BERT-large (2018) to PaLM (2022), oldest first."""
    text = resources.files("fmlab.data").joinpath("tables/model_growth.csv").read_text("utf-8")
    return [
        PublishedModel(row["model"], row["month"], float(row["parameters"]), row["source"])
        for row in csv.DictReader(text.splitlines())
    ]


def moores_law(years: float, doubling_years: float = 2.0) -> float:
    """How many times more transistors a chip has after `years`, if they double every `doubling_years`.

    Moore 1975, "Progress in digital integrated electronics" (two years; his estimate of 1965 was one).
    """
    return float(2 ** (years / doubling_years))
