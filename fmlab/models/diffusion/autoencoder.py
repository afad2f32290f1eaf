"""Stable Diffusion's autoencoder: images to latents of an eighth of their size, and back.

A convolutional variational autoencoder (Kingma and Welling 2014, arXiv:1312.6114; Rombach et al. 2022,
arXiv:2112.10752, section 3.1 and appendix G). The encoder gives a Gaussian for each latent number; the
decoder makes an image of what is drawn from it.

Latents have two scales. The network's own is arbitrary (a standard deviation of about 5 for Stable
Diffusion); a diffusion model wants about 1. Everything outside this file sees scaled latents: the last block
of the encoder multiplies by `scaling_factor`, the first of the decoder divides, and nobody else ever does.

Shapes: b batch, c channels, h height, w width, z latent channels, p h / 2^(levels - 1), q w / 2^(levels - 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, AttentionMask, sdpa_core
from fmlab.models.base import Model, check_sizes
from fmlab.models.diffusion.blocks import (
    Downsample,
    GroupNorm,
    ResNetBlock,
    Upsample,
    check_image,
    reset_like_torch,
)
from fmlab.models.diffusion.convolution import Conv2d, pixels_to_tokens, tokens_to_pixels
from fmlab.models.diffusion.gaussian import DiagonalGaussian
from fmlab.models.diffusion.presets import AUTOENCODER_PRESETS
from fmlab.models.hf import HFFormat
from fmlab.models.layers import SelfAttention
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block, State

EPS = 1e-6  # of every norm


@dataclass(frozen=True)
class AutoencoderConfig:
    """Shape of an autoencoder. Raises ValueError for shapes that cannot be.

    Args:
        channels: width of each level, from the full size down; each level halves height and width.
        scaling_factor: 1 over the standard deviation of the network's own latents: 0.18215 for Stable
            Diffusion 1 and 2, 0.13025 for XL. One autoencoder's factor is wrong for another.
        sample_size: height and width it was trained for; others are legal.
    """

    channels: tuple[int, ...]
    layers_per_level: int = 2
    latent_channels: int = 4
    in_channels: int = 3
    out_channels: int = 3
    norm_groups: int = 32
    scaling_factor: float = 0.18215
    sample_size: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))
        sizes = ("layers_per_level", "latent_channels", "in_channels", "out_channels", "norm_groups")
        check_sizes(self, *sizes, "sample_size")
        if not self.channels:
            raise ValueError("channels must name the width of one level at least")
        for width in self.channels:
            if width < 1 or width % self.norm_groups:
                legal = [n for n in range(1, width + 1) if width % n == 0]
                raise ValueError(
                    f"norm_groups={self.norm_groups} does not divide a level of {width} channels; "
                    f"legal: {legal}"
                )
        if not self.scaling_factor > 0:
            raise ValueError(f"scaling_factor must be above 0, got {self.scaling_factor}")

    @property
    def downscale(self) -> int:
        """How many times smaller latents are than images."""
        return 2 ** (len(self.channels) - 1)


@dataclass(frozen=True)
class Part:
    """One block between the first and the last of the encoder or the decoder."""

    side: Literal["encoder", "decoder"]
    kind: Literal["layer", "middle", "downsample", "upsample"]
    level: int
    index: int
    inputs: int
    outputs: int


def layout(config: AutoencoderConfig, side: Literal["encoder", "decoder"]) -> Iterator[Part]:
    """The parts of one side, in order."""
    last = len(config.channels) - 1
    if side == "encoder":
        width = config.channels[0]
        for level, out in enumerate(config.channels):
            for index in range(config.layers_per_level):
                yield Part(side, "layer", level, index, width, out)
                width = out
            if level < last:
                yield Part(side, "downsample", level, 0, out, out)
        yield Part(side, "middle", last, 0, width, width)
        return
    width = config.channels[-1]
    yield Part(side, "middle", last, 0, width, width)
    for level in reversed(range(last + 1)):
        out = config.channels[level]
        for index in range(config.layers_per_level + 1):
            yield Part(side, "layer", level, index, width, out)
            width = out
        if level:
            yield Part(side, "upsample", level, 0, out, out)


class PixelAttention(nn.Module):
    """x + attention(norm(x)) with one head as wide as the image has channels: pixels look at all pixels."""

    def __init__(self, channels: int, groups: int, core: AttentionCore):
        super().__init__()
        self.norm = GroupNorm(channels, groups, EPS)
        self.attention = SelfAttention(channels, channels, core)

    def forward(self, x_bchw: Tensor) -> Tensor:
        height, width = x_bchw.shape[2:]
        tokens_blc = pixels_to_tokens(self.norm(x_bchw))
        update_blc = self.attention(tokens_blc, AttentionMask(False, height * width, height * width))
        update_bchw = tokens_to_pixels(update_blc, height, width)
        return (x_bchw + update_bchw).add_(self.attention.output.bias[:, None, None])


class ImageBlock(Block):
    """hidden -> hidden: a residual block, or the middle (two, attention between), or a change of size."""

    reads = ("hidden",)
    writes = ("hidden",)

    def __init__(self, part: Part, config: AutoencoderConfig, core: AttentionCore):
        super().__init__()

        def resnet() -> ResNetBlock:
            return ResNetBlock(part.inputs, part.outputs, config.norm_groups, EPS, time_size=None)

        if part.kind == "downsample":
            self.steps = nn.ModuleList([Downsample(part.outputs, asymmetric=True)])
        elif part.kind == "upsample":
            self.steps = nn.ModuleList([Upsample(part.outputs)])
        elif part.kind == "layer":
            self.steps = nn.ModuleList([resnet()])
        else:
            attention = PixelAttention(part.outputs, config.norm_groups, core)
            self.steps = nn.ModuleList([resnet(), attention, resnet()])

    def forward(self, state: State) -> State:
        hidden = state.hidden
        for step in self.steps:
            hidden = step(hidden)
        return state.updated(hidden=hidden)


class EncoderInput(Block):
    """sample -> hidden: the encoder's first convolution."""

    reads = ("sample",)
    writes = ("hidden",)

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        self.conv = Conv2d(config.in_channels, config.channels[0], 3, padding=1)

    def forward(self, state: State) -> State:
        sample = state.sample.contiguous(memory_format=torch.channels_last)
        return state.updated(hidden=self.conv(sample))


class Latents(Block):
    """hidden (, noise) -> mean, log_variance, latents: the Gaussian, and its sample (or mode), SCALED."""

    reads = ("hidden", "noise")
    writes = ("mean", "log_variance", "latents")

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        self.scaling_factor = config.scaling_factor
        self.norm = GroupNorm(config.channels[-1], config.norm_groups, EPS)
        self.conv = Conv2d(config.channels[-1], 2 * config.latent_channels, 3, padding=1)
        self.quantize = Conv2d(2 * config.latent_channels, 2 * config.latent_channels, 1)

    def forward(self, state: State) -> State:
        moments = self.quantize(self.conv(F.silu(self.norm(state.hidden))))
        posterior = DiagonalGaussian.of(moments)
        latents = posterior.mode() if "noise" not in state else posterior.sample(state.noise)
        return state.updated(
            mean=posterior.mean, log_variance=posterior.log_variance, latents=latents * self.scaling_factor
        )


class DecoderInput(Block):
    """latents -> hidden: the scale taken off again, then the decoder's first two convolutions."""

    reads = ("latents",)
    writes = ("hidden",)

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        self.scaling_factor = config.scaling_factor
        self.unquantize = Conv2d(config.latent_channels, config.latent_channels, 1)
        self.conv = Conv2d(config.latent_channels, config.channels[-1], 3, padding=1)

    def forward(self, state: State) -> State:
        latents = (state.latents / self.scaling_factor).contiguous(memory_format=torch.channels_last)
        return state.updated(hidden=self.conv(self.unquantize(latents)))


class DecoderOutput(Block):
    """hidden -> sample: norm, SiLU, the last convolution."""

    reads = ("hidden",)
    writes = ("sample",)

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        self.norm = GroupNorm(config.channels[0], config.norm_groups, EPS)
        self.conv = Conv2d(config.channels[0], config.out_channels, 3, padding=1)

    def forward(self, state: State) -> State:
        return state.updated(sample=self.conv(F.silu(self.norm(state.hidden))))


class AutoencoderKL(Model):
    """An autoencoder: `encode(images)` gives latents, `decode(latents)` images, `model(images)` does both.

    Args:
        attention_core: see fmlab.models.attention.
    """

    CONFIG = AutoencoderConfig
    PRESETS = AUTOENCODER_PRESETS

    def __init__(self, config: AutoencoderConfig, attention_core: AttentionCore = sdpa_core):
        super().__init__()
        self.config: AutoencoderConfig = config
        encoder = [ImageBlock(part, config, attention_core) for part in layout(config, "encoder")]
        decoder = [ImageBlock(part, config, attention_core) for part in layout(config, "decoder")]
        self.latents_at = len(encoder) + 2  # blocks before this one are the encoder
        self.blocks = nn.ModuleList(
            [
                EncoderInput(config),
                *encoder,
                Latents(config),
                DecoderInput(config),
                *decoder,
                DecoderOutput(config),
            ]
        )
        self.finish()

    def forward(self, sample: Tensor, noise: Tensor | None = None) -> State:
        """Encode and decode: what training needs.

        Args:
            sample: images [b,c,h,w], in [-1, 1] by convention.
            noise: standard normal [b,z,p,q], to draw the latents; None for the most likely ones.

        Returns a State with `sample` (the images again), `latents` (scaled), and `mean` and `log_variance` of
        the network's own latents, for the KL term (see DiagonalGaussian).
        """
        state = self.prepare(sample, noise)
        for block in self.blocks:
            state = block(state)
        return state

    def encode(self, sample: Tensor, noise: Tensor | None = None) -> Tensor:
        """Scaled latents [b,z,p,q] of images; arguments as for forward."""
        return self._encoded(sample, noise).latents

    def posterior(self, sample: Tensor) -> DiagonalGaussian:
        """The Gaussian of the network's own, unscaled latents."""
        state = self._encoded(sample, None)
        return DiagonalGaussian(state.mean, state.log_variance)

    def decode(self, latents: Tensor) -> Tensor:
        """Images [b,c,h,w] from scaled latents [b,z,p,q]. Raises ValueError for other shapes."""
        check_image("latents", latents, self.config.latent_channels, 1, "latents have any size")
        state = State(latents=latents)
        for block in self.blocks[self.latents_at :]:
            state = block(state)
        return state.sample

    def prepare(self, sample: Tensor, noise: Tensor | None = None) -> State:
        """Check a batch and make the State that the first block reads; arguments as for forward.

        Raises ValueError for images whose sides are not divisible by `downscale`, and shapes that disagree.
        """
        times = self.config.downscale
        check_image("sample", sample, self.config.in_channels, times, f"latents are {times} times smaller")
        if noise is None:
            return State(sample=sample)
        batch, _, height, width = sample.shape
        needed = [batch, self.config.latent_channels, height // times, width // times]
        if list(noise.shape) != needed:
            raise ValueError(f"noise must have the shape of the latents, {needed}, got {list(noise.shape)}")
        return State(sample=sample, noise=noise)

    @torch.no_grad()
    def measure_scale(self, sample: Tensor, noise: Tensor | None = None) -> float:
        """Set scaling_factor so that the latents of these images have standard deviation 1; returns it.

        For a newly trained autoencoder (Rombach et al. 2022, appendix G). Never for one whose latents a
        diffusion model was already trained on.
        """
        scaling_factor = self.config.scaling_factor / float(self.encode(sample, noise).float().std())
        self.config = replace(self.config, scaling_factor=scaling_factor)
        for block in self.blocks:
            if isinstance(block, Latents | DecoderInput):
                block.scaling_factor = scaling_factor
        return scaling_factor

    def _encoded(self, sample: Tensor, noise: Tensor | None) -> State:
        state = self.prepare(sample, noise)
        for block in self.blocks[: self.latents_at]:
            state = block(state)
        return state

    # ---- weights -------------------------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Fill all weights anew with torch's defaults, as the code of the latent diffusion paper does."""
        reset_like_torch(self)

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut.

        The residual blocks are divided by whole groups; the single wide head of the middle cannot be.
        """
        rules = [Rule(r"blocks\.\d+\.(conv|norm|quantize|unquantize)\.(weight|bias)", "replicate")]
        rules.append(Rule(r"blocks\.\d+\.steps\.1\..*", "replicate"))
        if len(self.config.channels) > 1:
            rules.append(Rule(r"blocks\.\d+\.steps\.0\.conv\.(weight|bias)", "replicate"))
        for name, part in self.named_modules():
            if isinstance(part, ResNetBlock):
                rules += part.rules(name.replace(".", r"\."))
        return ParallelPlan(tuple(rules), tied=(), cuts=tuple(range(1, len(self.blocks))))

    @classmethod
    def hf_format(cls) -> HFFormat:
        """diffusers' AutoencoderKL."""
        from fmlab.models.diffusion.autoencoder_hf import FORMAT

        return FORMAT
