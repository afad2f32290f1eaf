"""Rounding to any format: to the nearest number, toward zero, or by chance.

Every format has gaps; a number inside one goes to one of its two ends. All steps of the arithmetic here are
exact, so that results are those of the formats' definitions, bit for bit: scaling is by powers of two, and in
fp64 where steps of the format are close to the smallest numbers of fp32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fmlab.train.precision.formats import Format, number_format, power_of_two

MODES = ("nearest", "zero", "stochastic")


def round_to(
    x: Tensor,
    fmt: str | torch.dtype | Format,
    mode: str = "nearest",
    saturate: bool | None = None,
    generator: torch.Generator | None = None,
    draws: Tensor | None = None,
) -> Tensor:
    """The numbers of `fmt` that x [...] becomes, held in fp32 (fp64 for fp64 and whole-number inputs).

    mode:      "nearest": ties go to the end whose last bit is 0 (IEEE 754's default); "zero": the end closer
               to zero; "stochastic": the end away from zero with the probability of how far x is on the way
               there, so that the mean over many draws is x
    saturate:  what lies beyond the largest number becomes the largest number, infinities too. Otherwise it
               becomes what the format has for it: infinity, or not-a-number. By default only where the format
               has neither.
    generator: of the draws; draws: numbers in [0, 1) of the shape of x, in place of drawn ones

    Not-a-number stays so, whatever the format has for it. Raises ValueError for an unknown mode or format,
    and for saturate=False where the format has nothing beyond its largest number.
    """
    fmt = number_format(fmt)
    if mode not in MODES:
        raise ValueError(f"there is no rounding {mode!r}; legal are {', '.join(MODES)}")
    if fmt.specials == "none" and saturate is False:
        raise ValueError(f"{fmt.name} has no infinity and no not-a-number: what is too large must saturate")
    if x.is_complex():
        raise ValueError(f"a complex number ({x.dtype}) is two numbers: round x.real and x.imag")
    if not x.is_floating_point():
        x = x.double()
    enough = x.dtype != torch.float64 and fmt.smallest >= 2.0**-100
    wide = x.float() if enough else x.double()
    step = _step(wide, fmt)
    steps = wide / step  # exact: a division by a power of two
    rounded = _WHOLE[mode](steps, lambda: _draws(steps, generator, draws)) * step
    rounded = _beyond(rounded, wide, fmt, mode, fmt.specials == "none" if saturate is None else saturate)
    rounded = rounded.copysign(wide) if fmt.is_float else rounded + 0.0
    return rounded.to(torch.promote_types(x.dtype, torch.float32))


# region steps
def _step(x: Tensor, fmt: Format) -> Tensor:
    """The distance of the numbers of `fmt` around x: 2^(exponent - mantissa bits)."""
    if not fmt.is_float:
        return torch.ones_like(x)
    exponent = torch.frexp(x.where(x.isfinite(), 1.0)).exponent - 1  # x = 1.… * 2^exponent
    exponent = exponent.where(x != 0, fmt.min_exponent).clamp(min=fmt.min_exponent)
    return power_of_two(exponent - fmt.mantissa_bits, x.dtype)


def _by_chance(steps: Tensor, draws: Callable[[], Tensor]) -> Tensor:
    """A whole number next to each of `steps`; the farther from zero with probability `fraction`."""
    size = steps.abs()
    below = size.floor()
    fraction = size - below  # exact
    return (below + (draws() < fraction)).copysign(steps)


_WHOLE: dict[str, Callable[[Tensor, Callable[[], Tensor]], Tensor]] = {
    "nearest": lambda steps, _: steps.round(),  # torch.round: ties to even
    "zero": lambda steps, _: steps.trunc(),
    "stochastic": _by_chance,
}
# endregion


def fit(x: Tensor, fmt: Format) -> Tensor:
    """round_to(x, fmt, saturate=True) in fp32, by torch's own cast where it has the format.

    Bit for bit the same, and many times as fast: for what is done at every step of a training run.
    """
    if fmt.dtype is None or not fmt.is_float:
        return round_to(x, fmt, saturate=True).float()
    return x.float().clamp(fmt.min, fmt.max).to(fmt.dtype).float()


def _draws(like: Tensor, generator: torch.Generator | None, draws: Tensor | None) -> Tensor:
    if draws is None:
        return torch.rand(like.shape, dtype=torch.float64, device=like.device, generator=generator)
    if draws.shape != like.shape:
        raise ValueError(f"draws have the shape {tuple(draws.shape)}, x has {tuple(like.shape)}")
    return draws.double()


def _beyond(rounded: Tensor, x: Tensor, fmt: Format, mode: str, saturate: bool) -> Tensor:
    """`rounded` with what is too large for `fmt` replaced."""
    low, high = fmt.min, fmt.max
    if saturate or mode == "zero":  # toward zero, a finite number never leaves the format
        kept = rounded.clamp(low, high)
        if saturate:
            return kept
        rounded = torch.where(x.isinf(), rounded, kept)
    special = torch.inf if fmt.specials == "ieee" else torch.nan
    return rounded.masked_fill((rounded > high) | (rounded < low), special)


def tf32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [n,k] @ b [k,m] as a tensor core does in TF32 mode: factors in 10 mantissa bits, sums in fp32."""
    return round_to(a.float(), "tf32") @ round_to(b.float(), "tf32")
