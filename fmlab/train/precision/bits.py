"""A number as its bits: sign, exponent, mantissa, and what they say."""

import math
from dataclasses import dataclass

import torch

from fmlab.train.precision.formats import Format, encode, number_format
from fmlab.train.precision.rounding import round_to


@dataclass(frozen=True)
class Bits:
    """One number in one format.

    asked: what was to be written; value: what the format makes of it (nearest); code: the bits as a whole
    number. sign, exponent, mantissa: the bits as text; exponent is "" for whole numbers.
    """

    format: Format
    asked: float
    value: float
    code: int
    sign: str
    exponent: str
    mantissa: str

    @property
    def error(self) -> float:
        """value - asked, in terms of asked; 0 for 0."""
        return (self.value - self.asked) / abs(self.asked) if self.asked else 0.0

    @property
    def meaning(self) -> str:
        """The number as its bits spell it."""
        fmt = self.format
        if not math.isfinite(self.value):
            return str(self.value)
        if not fmt.is_float:
            return f"{int(self.value)}"
        minus = "-" if self.sign == "1" else ""
        fraction = int(self.mantissa or "0", 2) / 2**fmt.mantissa_bits
        field = int(self.exponent, 2)
        lead, power = (1, field - fmt.bias) if field else (0, fmt.min_exponent)
        return f"{minus}{lead + fraction:.10g} x 2^{power} = {self.value:.10g}"

    def __str__(self) -> str:
        groups = " ".join(part for part in (self.sign, self.exponent, self.mantissa) if part)
        return f"{self.format.name}: {groups} = {self.meaning}"


def bits_of(number: float, fmt: str | torch.dtype | Format) -> Bits:
    """The bits of `number`, rounded to the nearest number of the format.

    ValueError for an unknown format, and for not-a-number in a format that has no code for it.
    """
    fmt = number_format(fmt)
    if math.isnan(number) and fmt.specials == "none":
        raise ValueError(f"{fmt.name} has no code for not-a-number")
    value = round_to(torch.tensor(number, dtype=torch.float64), fmt)
    code = int(encode(value, fmt))
    text = f"{code:0{fmt.bits}b}"
    ends = 1 + fmt.exponent_bits
    return Bits(fmt, number, float(value), code, text[0], text[1:ends], text[ends:])
