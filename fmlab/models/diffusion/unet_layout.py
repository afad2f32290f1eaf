"""The shape of a Stable Diffusion UNet, and the order of the parts that follow from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fmlab.models.base import check_dropout, check_sizes


@dataclass(frozen=True)
class UNetConfig:
    """Shape of a UNet. Raises ValueError for shapes that cannot be.

    Args:
        channels: width of each level, from the full size down; each level halves height and width.
        heads: number of attention heads of each level (diffusers calls this `attention_head_dim`).
        text_size: width d of the text's hidden states.
        attention: which levels look at the text; None for all but the smallest.
        sample_size: height and width it was trained for; others are legal.
    """

    channels: tuple[int, ...]
    heads: tuple[int, ...]
    text_size: int
    attention: tuple[bool, ...] | None = None
    layers_per_level: int = 2
    linear_projection: bool = False
    in_channels: int = 4
    out_channels: int = 4
    norm_groups: int = 32
    norm_eps: float = 1e-5
    dropout: float = 0.0
    sample_size: int = 64

    def __post_init__(self) -> None:
        levels = len(self.channels)
        if self.attention is None:
            object.__setattr__(self, "attention", (True,) * (levels - 1) + (False,))
        for name in ("channels", "heads", "attention"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not levels or len(getattr(self, name)) != levels:
                raise ValueError(
                    f"channels, heads and attention must have one entry for each level, got "
                    f"{self.channels}, {self.heads} and {self.attention}"
                )
        sizes = ("text_size", "layers_per_level", "in_channels", "out_channels", "norm_groups", "sample_size")
        check_sizes(self, *sizes)
        check_dropout(self, "dropout")
        for width, heads in zip(self.channels, self.heads, strict=True):
            for what, number in (("heads", heads), ("norm_groups", self.norm_groups)):
                if number < 1 or width < 1 or width % number:
                    legal = [n for n in range(1, width + 1) if width % n == 0]
                    raise ValueError(
                        f"{what}={number} does not divide a level of {width} channels; legal: {legal}"
                    )
        for part in layout(self):
            if part.inputs % self.norm_groups:
                raise ValueError(
                    f"norm_groups={self.norm_groups} does not divide the {part.inputs} channels of a level "
                    "and its skip together"
                )

    @property
    def time_size(self) -> int:
        """Width of the time embedding: four times that of the first level."""
        return 4 * self.channels[0]

    @property
    def multiple(self) -> int:
        """What height and width must be divisible by."""
        return 2 ** (len(self.channels) - 1)


@dataclass(frozen=True)
class Part:
    """One block of a UNet between its first and its last.

    Args:
        kind: what it is; `level` and `index` say which.
        inputs, outputs: channels; those of a skip are counted in.
        heads: of its transformer; 0 if it has none.
        skip: number of the skip that it writes (down, downsample) or reads (up); -1 for none.
    """

    kind: Literal["down", "downsample", "middle", "up", "upsample"]
    level: int
    index: int
    inputs: int
    outputs: int
    heads: int = 0
    skip: int = -1


def layout(config: UNetConfig) -> Iterator[Part]:
    """The parts of a UNet in order: down each level, through the middle, up with the skips, last first."""
    assert config.attention is not None
    heads = [number * used for number, used in zip(config.heads, config.attention, strict=True)]
    width, last = config.channels[0], len(config.channels) - 1
    skips = [width]  # channels of each; skip_0 is the first convolution's
    for level, out in enumerate(config.channels):
        for index in range(config.layers_per_level):
            yield Part("down", level, index, width, out, heads[level], skip=len(skips))
            skips.append(width := out)
        if level < last:
            yield Part("downsample", level, 0, out, out, skip=len(skips))
            skips.append(out)
    yield Part("middle", last, 0, width, width, config.heads[-1])
    for level in reversed(range(last + 1)):
        for index in range(config.layers_per_level + 1):
            inputs = width + skips.pop()
            width = config.channels[level]
            yield Part("up", level, index, inputs, width, heads[level], skip=len(skips))
        if level:
            yield Part("upsample", level, 0, width, width)
