"""A figure with everything that is needed to use it rightly: unit, convention, source."""

from dataclasses import dataclass

#: unit -> (how many base units one is, the base unit)
UNITS = {
    "TFLOP/s": (1e12, "FLOP/s"),
    "FLOP/s": (1.0, "FLOP/s"),
    "TOP/s": (1e12, "FLOP/s"),  # integer operations, as many a second
    "TB/s": (1e12, "B/s"),
    "GB/s": (1e9, "B/s"),
    "GiB/s": (2.0**30, "B/s"),
    "B/s": (1.0, "B/s"),
    "Gbit/s": (1e9 / 8, "B/s"),
    "GB": (1e9, "B"),
    "GiB": (2.0**30, "B"),
    "MiB": (2.0**20, "B"),
    "B": (1.0, "B"),
    "us": (1e-6, "s"),
    "GHz": (1e9, "1/s"),
    "USD/h": (1.0, "USD/h"),
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
        return self.value * UNITS[self.unit][0]

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit} ({self.convention}; {self.source})"
