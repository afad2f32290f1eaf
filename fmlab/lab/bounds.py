"""A measured number beside the bound that it must keep: it says more than True and is as repeatable."""

import re

from fmlab.lab.table import number, unit_text


def within(
    what: str,
    value: float,
    below: float | None = None,
    above: float | None = None,
    unit: str = "",
    digits: int = 2,
) -> None:
    """Print `value`, marked as one that differs from machine to machine, and whether it keeps its bounds.

        within("largest difference", 2.4e-7, below=1e-6)      # largest difference: ≈2.4e-7, below 1e-6: yes

    Tests compare all of the line but the number. The bounds themselves are excluded; not-a-number keeps none.
    ValueError without a bound.
    """
    if below is None and above is None:
        raise ValueError(f"{what!r} has no bound: give below= or above=, or print the number itself")
    unit = f" {unit_text(unit)}" if unit_text(unit) else ""
    bounds = [
        f"{word} {_short(bound)}{unit}"
        for word, bound in (("above", above), ("below", below))
        if bound is not None
    ]
    kept = (above is None or value > above) and (below is None or value < below)
    print(f"{what}: ≈{number(float(value), digits)}{unit}, {' and '.join(bounds)}: {'yes' if kept else 'NO'}")


def _short(bound: float) -> str:
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{bound:,g}")
