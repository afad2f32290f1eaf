"""Microscaling (MX) formats: blocks of 32 small numbers that share a power of two.

OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 (the shared scale, E8M0), 5.3 (the numbers)
and 6.3 (conversion): with amax the largest number of the block, the scale is 2^(floor(log2 amax) - e), e the
exponent of the element format's largest number; then each number is divided by the scale and rounded, and
what is too large saturates.

That rule cuts up to an eighth off the largest number of an E4M3 block. `up=True` takes the smallest power of
two under which nothing saturates, as NVIDIA trains with MXFP8 (Mishra et al. 2025, arXiv:2506.08027).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fmlab.train.precision.formats import FORMATS, Format, power_of_two
from fmlab.train.precision.rounding import fit

BLOCK = 32
SCALE_EXPONENTS = (-127, 127)  # of E8M0: eight bits, no sign, no mantissa; the last code is not-a-number


@dataclass(frozen=True)
class MXFormat:
    """A Microscaling format. element: of each number; shift: a whole number n stands for n * 2^shift."""

    name: str
    element: Format
    shift: int = 0

    @property
    def bits(self) -> float:
        """A number, with its share of the scale."""
        return self.element.bits + 8 / BLOCK

    @property
    def max_exponent(self) -> int:
        """Of the largest number of a block with scale 1."""
        return self.element.max_exponent if self.element.is_float else 0

    @property
    def max(self) -> float:
        """The largest number of a block with scale 1."""
        return self.element.max * 2.0**self.shift

    def __str__(self) -> str:
        return self.name


_ALL = (
    MXFormat("mxfp8-e4m3", FORMATS["fp8-e4m3"]),
    MXFormat("mxfp8-e5m2", FORMATS["fp8-e5m2"]),
    MXFormat("mxfp6-e3m2", FORMATS["fp6-e3m2"]),
    MXFormat("mxfp6-e2m3", FORMATS["fp6-e2m3"]),
    MXFormat("mxfp4", FORMATS["fp4-e2m1"]),
    MXFormat("mxint8", FORMATS["int8"], shift=-6),
)
#: name -> format
MX_FORMATS: Mapping[str, MXFormat] = {one.name: one for one in _ALL}


def mx_format(name: str | MXFormat) -> MXFormat:
    """The format of that name. Raises ValueError with the legal names."""
    if isinstance(name, MXFormat):
        return name
    if name not in MX_FORMATS:
        raise ValueError(f"there is no MX format {name!r}; legal are {', '.join(MX_FORMATS)}")
    return MX_FORMATS[name]


# region mx
def mx_scales(blocks: Tensor, fmt: str | MXFormat, up: bool = False) -> Tensor:
    """The shared scale of each block [...,32] -> [...,1] in fp64; nan for a block with an inf or nan."""
    fmt = mx_format(fmt)
    amax = blocks.double().abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax.where(amax.isfinite(), 1.0))  # amax = mantissa * 2^exponent
    exponent = torch.where(amax > 0, exponent - 1 - fmt.max_exponent, SCALE_EXPONENTS[0])
    if up:
        exponent = exponent + (2 * mantissa > fmt.max / 2.0**fmt.max_exponent)
    scale = power_of_two(exponent.clamp(*SCALE_EXPONENTS))
    return scale.where(amax.isfinite(), torch.nan)


def mx_round(x: Tensor, fmt: str | MXFormat, dim: int = -1, up: bool = False) -> Tensor:
    """The numbers of an MX format that x becomes (nearest), in fp32; blocks lie along `dim`.

    A last block of fewer than 32 is one of its own. Raises ValueError as mx_format.
    """
    fmt = mx_format(fmt)
    moved = x.movedim(dim, -1)
    length = moved.shape[-1]
    blocks = torch.nn.functional.pad(moved, (0, -length % BLOCK)).unflatten(-1, (-1, BLOCK))
    step = (mx_scales(blocks, fmt, up) * 2.0**fmt.shift).float()
    rounded = fit(blocks.float() / step, fmt.element) * step
    return rounded.flatten(-2)[..., :length].movedim(-1, dim).float()


# endregion
