"""A figure with everything that is needed to use it rightly: unit, convention, source."""

from dataclasses import dataclass
from fractions import Fraction

#: unit -> how many base units one is (FLOP/s, bytes, bytes a second, seconds, dollars an hour)
UNITS = {
    "TFLOP/s": Fraction(10**12),
    "FLOP/s": Fraction(1),
    "TOP/s": Fraction(10**12),  # integer operations
    "TB/s": Fraction(10**12),
    "GB/s": Fraction(10**9),
    "GiB/s": Fraction(2**30),
    "B/s": Fraction(1),
    "Gbit/s": Fraction(10**9, 8),
    "GB": Fraction(10**9),
    "GiB": Fraction(2**30),
    "MiB": Fraction(2**20),
    "B": Fraction(1),
    "us": Fraction(1, 10**6),
    "GHz": Fraction(10**9),
    "W": Fraction(1),
    "USD/h": Fraction(1),
}


@dataclass(frozen=True)
class Figure:
    """One published or measured number.

    value, unit: as published, or converted; then the convention says from what
    convention:  what it counts: dense or sparse, per chip or per core, one way or both ways
    source:      where it was read, or how it was measured
    also:        what other sources say; the figure itself is the one that is used
    """

    value: float
    unit: str
    convention: str
    source: str
    also: tuple["Figure", ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unknown unit {self.unit!r}; known: {', '.join(UNITS)}")
        if not self.value > 0:
            raise ValueError(f"a figure is above 0, not {self.value!r} {self.unit}")
        if not (self.convention.strip() and self.source.strip()):
            raise ValueError(f"{self.value} {self.unit} has no convention or no source: say what it counts")

    @property
    def base(self) -> float:
        """The value in FLOP/s, bytes, bytes a second, seconds or dollars an hour."""
        return float(Fraction(str(self.value)) * UNITS[self.unit])

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit} ({self.convention}; {self.source})"
