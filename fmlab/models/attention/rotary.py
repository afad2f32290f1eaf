"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864, section 3.4) and its scalings.

Each query and key of width k is seen as k/2 pairs of numbers, and pair i of the token at position p is
turned by the angle p * theta^(-2i/k). The product of a query and a key then depends on how far apart they
are and not on where they stand. A scaling lowers the frequencies, so that a model sees longer texts than it
was trained on.

Two conventions of what a pair is are in circulation, and weights made for one are wrong for the other:

- half-split (Hugging Face's Llama, Qwen, Mixtral): number i is paired with number i + k/2. The default here.
- interleaved (the paper, Meta's Llama files, DeepSeek): number 2i is paired with number 2i + 1.

Frequencies and angles are fp32 whatever the model's dtype: in bf16 position 257 is position 256. They are
computed when asked for and are no buffer, so neither `.bfloat16()` nor a trip over the meta device spoils
them.

Shapes: b batch, l length, h heads, k head width.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor`: positions are squeezed (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(self, head_size: int, theta: float, device: torch.device | None, length: None) -> Tensor:
        return _plain(head_size, theta, device) / self.factor


@dataclass(frozen=True)
class DynamicNTKScaling:
    """A base that grows with the text, once that is longer than `original_max_positions`.

    The fastest pair keeps its frequency and the slowest gets the length's share of `factor`, as computed by
    transformers' "dynamic"; published only in forum posts, described in YaRN's paper, section 3.1-3.3.

    Every key in a cache must have been turned with one base, so with a cache the length is the one that the
    cache was made for, or the model's max_positions if it grows with the text. (transformers changes the
    base in mid-text and leaves the old keys as they are.)
    """

    factor: float
    original_max_positions: int
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_positions(self.original_max_positions)

    def frequencies(
        self, head_size: int, theta: float, device: torch.device | None, length: int | Tensor | None
    ) -> Tensor:
        if length is None:
            length = self.original_max_positions
        elif isinstance(length, Tensor):
            length = length.clamp(min=self.original_max_positions)
        else:
            length = max(length, self.original_max_positions)
        stretch = self.factor * length / self.original_max_positions - (self.factor - 1)
        return _plain(head_size, theta * stretch ** (head_size / (head_size - 2)), device)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: slow pairs divided by `factor`, fast ones left, those between mixed.

    Slow: fewer than `low_freq_factor` turns in `original_max_positions` tokens; fast: more than
    `high_freq_factor`. Source: Meta's reference code (llama-models, `apply_scaling`).
    """

    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_positions(self.original_max_positions)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "low_freq_factor must be above 0 and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )

    def frequencies(self, head_size: int, theta: float, device: torch.device | None, length: None) -> Tensor:
        plain = _plain(head_size, theta, device)
        wavelength = 2 * math.pi / plain
        turns = self.original_max_positions / wavelength
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        mixed = (1 - kept) * plain / self.factor + kept * plain
        slow = wavelength > self.original_max_positions / self.low_freq_factor
        fast = wavelength < self.original_max_positions / self.high_freq_factor
        return torch.where(fast, plain, torch.where(slow, plain / self.factor, mixed))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp between scaled and plain, and warmer attention.

    Pairs with fewer than `beta_slow` turns in `original_max_positions` tokens are divided by `factor`, those
    with more than `beta_fast` are left. cos and sin are multiplied by `attention_factor`: given, or
    0.1 ln(factor) + 1 (section 3.4), or a ratio of two such terms if both mscales are given (DeepSeek).
    `truncate` rounds the ends of the ramp outwards to whole pairs.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    given_attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_positions(self.original_max_positions)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow must be above 0 and below beta_fast, got {self.beta_slow} and {self.beta_fast}"
            )

    @property
    def attention_factor(self) -> float:
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    def frequencies(self, head_size: int, theta: float, device: torch.device | None, length: None) -> Tensor:
        low = self._pair_with(self.beta_fast, head_size, theta)
        high = self._pair_with(self.beta_slow, head_size, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)
        high += 0.001 if low == high else 0.0  # a ramp of no width is a step
        pair = torch.arange(head_size // 2, dtype=torch.float32, device=device)
        kept = 1 - ((pair - low) / (high - low)).clamp(0, 1)
        powers = theta ** _exponents(head_size, device)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _pair_with(self, turns: float, head_size: int, theta: float) -> float:
        """Index of the pair, not rounded, that makes this many turns in the original length."""
        span = self.original_max_positions / (turns * 2 * math.pi)
        return head_size * math.log(span) / (2 * math.log(theta))


RopeScaling = LinearScaling | DynamicNTKScaling | Llama3Scaling | YarnScaling


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1, or 1 if nothing is stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Rotary:
    """The angles of one width of head: `cos, sin = rotary(position_ids)`, then `rotate(x, cos, sin)`.

    Raises ValueError for a width without whole pairs.
    """

    head_size: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"rotary positions need an even head width, got {self.head_size}")
        if self.theta <= 1:
            raise ValueError(f"theta must be above 1, got {self.theta}")
        if isinstance(self.scaling, DynamicNTKScaling) and self.head_size < 4:
            raise ValueError(f"dynamic NTK scaling needs a head width of 4 at least, got {self.head_size}")

    def frequencies(self, device: torch.device | None = None, length: int | Tensor | None = None) -> Tensor:
        """Radians per position of each pair, fp32 [k/2]. `length` matters to dynamic NTK scaling only."""
        if self.scaling is None:
            return _plain(self.head_size, self.theta, device)
        if isinstance(self.scaling, DynamicNTKScaling):
            return self.scaling.frequencies(self.head_size, self.theta, device, length)
        return self.scaling.frequencies(self.head_size, self.theta, device, None)

    def __call__(self, position_ids: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles for position_ids [b,l], fp32 [b,1,l,k], as `rotate` takes them: those of
        the k/2 pairs twice, the first half of the sines negated.

        length: of the text that all of this belongs to, where it is known (that of a cache); if it is None
        and the scaling asks for it, the largest position here + 1.
        """
        of_text: int | Tensor | None = length
        if length is None and isinstance(self.scaling, DynamicNTKScaling):
            of_text = position_ids.max() + 1
        frequencies = self.frequencies(position_ids.device, of_text)
        angles = position_ids[:, None, :, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        if self.scaling is None or self.scaling.attention_factor == 1:
            return cos, sin
        return cos * self.scaling.attention_factor, sin * self.scaling.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [b,h,l,k] with each pair turned by its angle; cos and sin [b,1,l,k] as Rotary gives them.

    Computed in fp32 or wider and returned in x's dtype. An `interleaved` input comes back half-split: the
    order of the pairs does not matter to the product of a query and a key, if both are reordered alike.
    """
    if interleaved:
        x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
    # (first, second) -> (first * cos - second * sin, second * cos + first * sin), in three operations
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def _exponents(head_size: int, device: torch.device | None) -> Tensor:
    return torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size


def _plain(head_size: int, theta: float | Tensor, device: torch.device | None) -> Tensor:
    return 1.0 / (theta ** _exponents(head_size, device))


def _check_factor(factor: float) -> None:
    if not factor >= 1:
        raise ValueError(f"a rotary scaling stretches: factor must be at least 1, got {factor}")


def _check_positions(positions: int) -> None:
    if positions < 1:
        raise ValueError(f"original_max_positions must be at least 1, got {positions}")
