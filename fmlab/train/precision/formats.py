"""Number formats as data: how many bits for what, and which numbers they make.

A floating-point number is sign x 1.mantissa x 2^exponent; the smallest exponent also has numbers 0.mantissa
(subnormals), which fill the gap around zero. An integer format is a ruler with equal steps.

Sources: IEEE 754-2008 (fp32, fp16); Micikevicius et al. 2022, arXiv:2209.05433, Table 1, and OCP 8-bit
Floating Point Specification v1.0 (fp8); OCP Microscaling Formats Specification v1.0, section 5.3 (fp6, fp4);
NVIDIA A100 whitepaper 2020 (tf32).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

#: What the codes with the largest exponent mean: "ieee": infinities and not-a-number; "nan": only the code
#: with all bits set is no number; "none": every code is a number.
SPECIALS = ("ieee", "nan", "none")


@dataclass(frozen=True)
class Format:
    """A number format.

    name:          as in FORMATS
    exponent_bits: 0 for a whole-number format (two's complement)
    mantissa_bits: bits behind the leading one; of a whole number: all but the sign
    specials:      one of SPECIALS
    dtype:         torch's name of it, where torch has one
    stored_bits:   that one number takes in memory, where it is more than `bits` (tf32 lives in 32)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: str = "ieee"
    dtype: torch.dtype | None = None
    stored_bits: int = 0

    def __post_init__(self) -> None:
        if self.specials not in SPECIALS:
            raise ValueError(f"specials must be one of {', '.join(SPECIALS)}, got {self.specials!r}")

    @property
    def is_float(self) -> bool:
        return self.exponent_bits > 0

    @property
    def bits(self) -> int:
        """Sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def stored(self) -> int:
        """Bits of memory that one number takes."""
        return self.stored_bits or self.bits

    # region numbers
    @property
    def bias(self) -> int:
        """What is subtracted from the exponent's bits."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Of the smallest normal number (and of the subnormal ones)."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Of the largest number. IEEE formats give their last exponent to infinities and not-a-number."""
        return 2**self.exponent_bits - 1 - self.bias - (self.specials == "ieee")

    @property
    def max(self) -> float:
        """The largest number."""
        if not self.is_float:
            return float(2**self.mantissa_bits - 1)
        steps = 2 ** (self.mantissa_bits + 1) - 1 - (self.specials == "nan")  # 1.11…1, or one step less
        return steps * 2.0 ** (self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest number above zero with full precision."""
        return 2.0**self.min_exponent if self.is_float else 1.0

    @property
    def smallest(self) -> float:
        """The smallest number above zero: a step of the subnormal numbers."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits) if self.is_float else 1.0

    @property
    def epsilon(self) -> float:
        """The step from 1 to the next number."""
        return 2.0**-self.mantissa_bits if self.is_float else 1.0

    # endregion

    @property
    def min(self) -> float:
        """The most negative number: two's complement has one more below zero than above."""
        return -self.max if self.is_float else -self.max - 1

    def values(self) -> Tensor:
        """All numbers that the format has, in order, fp64; zero once. Up to 16 bits (ValueError)."""
        if self.bits > 16:
            raise ValueError(f"{self.name} has 2^{self.bits} codes; legal are formats of at most 16 bits")
        numbers = decode(torch.arange(2**self.bits), self)
        return torch.unique(numbers[numbers.isfinite()] + 0.0)

    def __str__(self) -> str:
        return self.name


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """The number of each code (the bits as a whole number, int64): fp64; inf and nan where they are meant."""
    sign_at, m = fmt.bits - 1, fmt.mantissa_bits
    negative = (codes >> sign_at) & 1
    if not fmt.is_float:
        return (codes - (negative << fmt.bits)).double()
    exponent = (codes >> m) & (2**fmt.exponent_bits - 1)
    mantissa = codes & (2**m - 1)
    normal = exponent > 0
    steps = mantissa + (normal.long() << m)  # 1.mantissa or 0.mantissa, in steps
    size = steps.double() * power_of_two(exponent.clamp(min=1) - fmt.bias - m)
    last = exponent == 2**fmt.exponent_bits - 1
    if fmt.specials == "ieee":
        size = size.where(~last, torch.where(mantissa == 0, torch.inf, torch.nan))
    elif fmt.specials == "nan":
        size = size.where(~(last & (mantissa == 2**m - 1)), torch.nan)
    return torch.where(negative.bool(), -size, size)


def encode(numbers: Tensor, fmt: Format) -> Tensor:
    """The codes of numbers that the format has, int64. ValueError for one that it has not: round it first."""
    x, m = numbers.double(), fmt.mantissa_bits
    if not fmt.is_float:
        codes = x.where(x.isfinite(), 0).long() & (2**fmt.bits - 1)
    else:
        codes = _size_code(x.abs(), fmt) + (x.signbit().long() << (fmt.exponent_bits + m))
    back = decode(codes, fmt)
    if not bool(((back == x) | (back.isnan() & x.isnan())).all()):
        wrong = x[~((back == x) | (back.isnan() & x.isnan()))].flatten()[0].item()
        raise ValueError(f"{wrong!r} is no number of {fmt.name}: round it first (round_to)")
    return codes


def _size_code(size: Tensor, fmt: Format) -> Tensor:
    """Exponent and mantissa bits of numbers without a sign."""
    m, top = fmt.mantissa_bits, (2**fmt.exponent_bits - 1) << fmt.mantissa_bits
    finite = size.where(size.isfinite(), 0)
    exponent = torch.frexp(finite).exponent.long() - 1
    exponent = torch.where(finite > 0, exponent, fmt.min_exponent).clamp(min=fmt.min_exponent)
    steps = (finite * power_of_two(m - exponent)).long()
    # A normal number's leading one is not stored; adding the steps to an exponent that is one too small
    # carries it into the exponent's bits. A subnormal number has none to carry.
    codes = steps + ((exponent - fmt.min_exponent) << m)
    codes = torch.where(size.isinf(), top if fmt.specials == "ieee" else -1, codes)
    return torch.where(size.isnan(), top + 2**m - 1 if fmt.specials != "none" else -1, codes)


def power_of_two(exponents: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """2.0 to whole exponents from -1022 to 1023 (fp32: -126 to 127): written as bits, so that it is exact."""
    if dtype == torch.float32:
        return ((exponents.int() + 127) << 23).view(torch.float32)
    return ((exponents.long() + 1023) << 52).view(torch.float64)


_ALL = (
    Format("fp32", 8, 23, dtype=torch.float32),
    Format("tf32", 8, 10, stored_bits=32),
    Format("bf16", 8, 7, dtype=torch.bfloat16),
    Format("fp16", 5, 10, dtype=torch.float16),
    Format("fp8-e4m3", 4, 3, "nan", torch.float8_e4m3fn),
    Format("fp8-e5m2", 5, 2, "ieee", torch.float8_e5m2),
    Format("fp6-e3m2", 3, 2, "none"),
    Format("fp6-e2m3", 2, 3, "none"),
    Format("fp4-e2m1", 2, 1, "none"),
    Format("int8", 0, 7, "none", torch.int8),
    Format("int4", 0, 3, "none"),
)
#: name -> format
FORMATS: Mapping[str, Format] = {one.name: one for one in _ALL}


@cache
def number_format(name: str | torch.dtype | Format) -> Format:
    """The format of a name or a torch dtype. Raises ValueError with the legal names."""
    if isinstance(name, Format):
        return name
    for one in _ALL:
        if name == one.name or (isinstance(name, torch.dtype) and name == one.dtype):
            return one
    raise ValueError(f"there is no number format {name!r}; legal are {', '.join(FORMATS)}")
