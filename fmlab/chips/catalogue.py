"""Chips by name, read from the tables in data/."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fmlab.chips.chip import Chip
from fmlab.chips.figures import Figure

VENDORS = ("nvidia", "google", "aws", "amd", "intel")
SHORT = {"trainium": "trn", "inferentia": "inf"}  # what AWS writes out, and what our names begin with


def chip(name: str) -> Chip:
    """The chip called `name`: chip("h100"). Raises ValueError for an unknown one and lists the known."""
    known = _all()
    if name not in known:
        raise ValueError(unknown("chip", name, known))
    return known[name]


def chips() -> list[str]:
    """The names of all chips, by vendor and age."""
    return list(_all())


def unknown(kind: str, name: Any, known: Iterable[str]) -> str:
    """What to say of a name that is not there."""
    known = list(known)
    asked = str(name).lower()
    for word, short in SHORT.items():
        asked = asked.replace(word, short)
    close = [one for one in known if asked and one.startswith(asked)][:4]
    close = close or difflib.get_close_matches(asked, known, n=1, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"unknown {kind} {name!r}; known: {', '.join(known)}{hint}"


@cache
def _all() -> dict[str, Chip]:
    found: dict[str, Chip] = {}
    for vendor in VENDORS:
        rows = read_table(vendor)
        for name, row in rows.items():
            base = rows[row["base"]] if "base" in row else {}
            found[name] = _chip(name, {**base, **row}, {**base.get("figures", {}), **row["figures"]})
    return found


def _chip(name: str, row: Mapping[str, Any], figures: Mapping[str, Any]) -> Chip:
    return Chip(
        name=name,
        title=row["title"],
        vendor=row["vendor"],
        unit=row["unit"],
        compiler=row["compiler"],
        cores=row.get("cores", 1 if row["unit"] == "core" else None),
        of=row.get("of"),
        table={key: read_figure(value) for key, value in figures.items()},
    )


def read_table(name: str) -> dict[str, Any]:
    """One file of data/, parsed."""
    return tomllib.loads(files("fmlab.chips").joinpath("data", f"{name}.toml").read_text("utf-8"))


def read_figure(row: Mapping[str, Any]) -> Figure:
    """A figure from its row; what other sources say has its unit and convention unless it gives its own."""
    also = [{"unit": row["unit"], "convention": row["convention"], **other} for other in row.get("also", ())]
    return Figure(
        value=row["value"],
        unit=row["unit"],
        convention=row["convention"],
        source=cite(row["source"]),
        also=tuple(read_figure(other) for other in also),
    )


def cite(keys: str | list[str]) -> str:
    """The citations that stand behind the keys of sources."""
    names = [keys] if isinstance(keys, str) else keys
    return "; ".join(_sources()[key] for key in names)


@cache
def _sources() -> dict[str, str]:
    return read_table("sources")
