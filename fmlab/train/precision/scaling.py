"""Scaling before rounding to 8 bits: a few bits of exponent suffice once the largest number fits them.

Each scaling is called with a tensor and gives back the numbers that a matrix product would see: scaled,
rounded, scaled back. Outside the largest number it saturates, as Transformer Engine's casts do.

CurrentScaling   one scale for the tensor, from its own largest number: it is read twice
DelayedScaling   one scale, from the largest numbers of earlier steps: it is read once
BlockScaling     one fp32 scale for each tile (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)
MXScaling        one power of two for each 32 numbers along the dim that is summed over (mx.py)
NoScaling        the format as it is

Shapes: tensors are matrices [n,k]; `dim` is the one that the product sums over.
"""

import torch
from torch import Tensor, nn

from fmlab.train.precision.formats import Format, number_format
from fmlab.train.precision.mx import MXFormat, mx_format, mx_round
from fmlab.train.precision.rounding import fit, round_to

ALGORITHMS = ("max", "most_recent")


# region scale
def scale_for(amax: Tensor, fmt: Format, previous: Tensor, margin: int = 0) -> Tensor:
    """What to multiply numbers up to `amax` by, so that they fill the format up to max / 2^margin.

    `previous` stays where amax says nothing: 0, infinite or not a number (Transformer Engine's rule). A scale
    is finite: for a tiny amax the largest fp32.
    """
    scale = fmt.max / amax / 2**margin
    scale = torch.where((amax > 0) & amax.isfinite(), scale, previous)
    return scale.clamp(max=torch.finfo(torch.float32).max)


# endregion


class Scaling(nn.Module):
    """A way to bring a matrix to few bits.

    by_dim: whether the result depends on the dim that is summed over, so that forward and backward products
    of one matrix need two of them
    """

    by_dim = False

    def forward(self, x: Tensor, dim: int) -> Tensor:
        """x [n,k] as the product sees it, in fp32. dim: 0 or 1, summed over."""
        raise NotImplementedError


class NoScaling(Scaling):
    """Rounding alone. saturate: see round_to."""

    def __init__(self, fmt: str | Format, saturate: bool | None = None):
        super().__init__()
        self.fmt, self.saturate = number_format(fmt), saturate

    def forward(self, x: Tensor, dim: int) -> Tensor:
        return round_to(x, self.fmt, saturate=self.saturate)


class CurrentScaling(Scaling):
    """One scale for the tensor, from its own largest number."""

    def __init__(self, fmt: str | Format, margin: int = 0):
        super().__init__()
        self.fmt, self.margin = number_format(fmt), margin

    def forward(self, x: Tensor, dim: int) -> Tensor:
        scale = scale_for(x.abs().amax().float(), self.fmt, torch.ones((), device=x.device), self.margin)
        return fit(x * scale, self.fmt) / scale


class DelayedScaling(Scaling):
    """One scale, from the largest numbers of the last `length` calls in training; 1 at the first call.

    algorithm: "max" of them, or the "most_recent". As in Transformer Engine (DelayedScaling, whose length is
    1024) a call uses the scale of before and notes its own largest number for the next one. In eval mode
    nothing is noted.

    Raises ValueError for a length below 1 and an unknown algorithm.
    """

    history: Tensor  # [length], the newest first; 0 where there is none yet
    scale: Tensor  # []

    def __init__(self, fmt: str | Format, length: int = 1024, algorithm: str = "max", margin: int = 0):
        super().__init__()
        if length < 1:
            raise ValueError(f"the history must have a length of at least 1, got {length}")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"there is no algorithm {algorithm!r}; legal are {', '.join(ALGORITHMS)}")
        self.fmt, self.algorithm, self.margin = number_format(fmt), algorithm, margin
        self.register_buffer("history", torch.zeros(length))
        self.register_buffer("scale", torch.ones(()))

    # region delayed
    def forward(self, x: Tensor, dim: int) -> Tensor:
        scale = self.scale.clone()  # of earlier calls
        if self.training:
            self._note(x.detach().abs().amax().float())
        return fit(x * scale, self.fmt) / scale

    @torch.no_grad()
    def _note(self, amax: Tensor) -> None:
        self.history.copy_(self.history.roll(1))
        self.history[0] = amax
        chosen = self.history.amax() if self.algorithm == "max" else self.history[0]
        self.scale.copy_(scale_for(chosen, self.fmt, self.scale, self.margin))

    # endregion


class BlockScaling(Scaling):
    """One fp32 scale for each tile.

    tile: (rows, columns); None for a strip of `length` along the dim that is summed over

    Raises ValueError for an empty tile.
    """

    def __init__(self, fmt: str | Format, tile: tuple[int, int] | None = None, length: int = 128):
        super().__init__()
        if min(tile or (length,)) < 1:
            raise ValueError(f"a tile needs at least one number, got tile={tile}, length={length}")
        self.fmt, self.tile, self.length, self.by_dim = number_format(fmt), tile, length, tile is None

    def forward(self, x: Tensor, dim: int) -> Tensor:
        rows, columns = self.tile or ((1, self.length) if dim == 1 else (self.length, 1))
        n, k = x.shape
        padded = torch.nn.functional.pad(x, (0, -k % columns, 0, -n % rows))
        tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        amax = tiles.abs().amax((1, 3), keepdim=True).float()
        scale = scale_for(amax, self.fmt, torch.ones_like(amax))
        return (fit(tiles * scale, self.fmt) / scale).view_as(padded)[:n, :k]


class MXScaling(Scaling):
    """A Microscaling format: blocks of 32 along the dim that is summed over. up: see mx_scales."""

    by_dim = True

    def __init__(self, fmt: str | MXFormat, up: bool = False):
        super().__init__()
        self.fmt, self.up = mx_format(fmt), up

    def forward(self, x: Tensor, dim: int) -> Tensor:
        return mx_round(x, self.fmt, dim, up=self.up)
