"""Stable Diffusion's UNet: its blocks, and a loop over them (their order and sizes: unet_layout.py).

A convolutional network that goes down to small images and up again, with the time in every residual block
and the text in every transformer (Ronneberger et al. 2015, arXiv:1505.04597; Ho et al. 2020,
arXiv:2006.11239; Rombach et al. 2022, arXiv:2112.10752). What the way down leaves for the way up are the
named tensors `skip_0`, `skip_1`, ..., so that a pipeline may cut anywhere and send those still needed.

Shapes: b batch, c channels, h height, w width, t width of the time embedding, m text tokens, d text width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, sdpa_core
from fmlab.models.base import Model
from fmlab.models.diffusion.blocks import (
    Downsample,
    GroupNorm,
    ResNetBlock,
    Upsample,
    check_image,
    reset_like_torch,
)
from fmlab.models.diffusion.convolution import Conv2d
from fmlab.models.diffusion.presets import UNET_PRESETS
from fmlab.models.diffusion.timestep import TimestepEmbedding, batch_of_timesteps
from fmlab.models.diffusion.transformer import SpatialTransformer
from fmlab.models.diffusion.unet_layout import Part, UNetConfig, layout
from fmlab.models.hf import HFFormat
from fmlab.models.inputs import check_values
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block, State

TEXT = ("encoder_hidden", "encoder_attention_mask")


class UNetInput(Block):
    """sample, timestep -> hidden (also skip_0), time: first convolution; time embedding and its SiLU."""

    reads = ("sample", "timestep")
    writes = ("hidden", "time", "skip_0")

    def __init__(self, config: UNetConfig):
        super().__init__()
        self.conv = Conv2d(config.in_channels, config.channels[0], 3, padding=1)
        self.time = TimestepEmbedding(config.channels[0], config.time_size)

    def forward(self, state: State) -> State:
        sample = state.sample.contiguous(memory_format=torch.channels_last)
        hidden = self.conv(sample)
        # Every residual block passes the embedding through a SiLU first: once is enough.
        return state.updated(hidden=hidden, skip_0=hidden, time=F.silu(self.time(state.timestep)))


class UNetLayer(Block):
    """hidden, time (, skip) (, text) -> hidden (, skip): a residual block, then the level's transformer.

    Some levels have no transformer. On the way down the result is also a skip; on the way up a skip is put
    beside the stream and used up. The middle has a second residual block.
    """

    def __init__(self, part: Part, config: UNetConfig, attention_core: AttentionCore):
        super().__init__()
        down, up = part.kind == "down", part.kind == "up"
        self.skip = f"skip_{part.skip}"
        self.keeps, self.takes = down, up
        self.reads = ("hidden", "time", *[self.skip] * up, *(TEXT if part.heads else ()))
        self.writes = ("hidden", *[self.skip] * down)

        def resnet(inputs: int) -> ResNetBlock:
            groups, eps, time_size = config.norm_groups, config.norm_eps, config.time_size
            return ResNetBlock(inputs, part.outputs, groups, eps, time_size, config.dropout)

        self.resnet = resnet(part.inputs)
        self.transformer = None
        if part.heads:
            self.transformer = SpatialTransformer(
                part.outputs,
                part.heads,
                config.text_size,
                config.norm_groups,
                attention_core,
                config.linear_projection,
            )
        self.resnet2 = resnet(part.outputs) if part.kind == "middle" else None

    def forward(self, state: State) -> State:
        hidden = state.hidden  # [b,c,h,w]
        if self.takes:
            hidden = torch.cat([hidden, state[self.skip]], 1)
            state = state.without(self.skip)  # nobody reads it again: without gradients its memory is free
        hidden = self.resnet(hidden, state.time)
        if self.transformer is not None:
            real = state.get("encoder_attention_mask")
            real = None if real is None else real.bool()
            hidden = self.transformer(hidden, state.encoder_hidden, real)
        if self.resnet2 is not None:
            hidden = self.resnet2(hidden, state.time)
        return state.updated(hidden=hidden, **({self.skip: hidden} if self.keeps else {}))

    def rules(self, name: str) -> tuple[Rule, ...]:
        """How the weights of this block, called `name`, may be divided."""
        rules = self.resnet.rules(rf"{name}\.resnet")
        if self.transformer is not None:
            rules += self.transformer.rules(rf"{name}\.transformer")
        return rules if self.resnet2 is None else rules + self.resnet2.rules(rf"{name}\.resnet2")


class UNetResample(Block):
    """hidden -> hidden: half the size on the way down (and a skip), twice the size on the way up."""

    reads = ("hidden",)

    def __init__(self, part: Part):
        super().__init__()
        down = part.kind == "downsample"
        self.skip = f"skip_{part.skip}" if down else None
        self.writes = ("hidden",) if self.skip is None else ("hidden", self.skip)
        self.resample = Downsample(part.outputs) if down else Upsample(part.outputs)

    def forward(self, state: State) -> State:
        hidden = self.resample(state.hidden)
        return state.updated(hidden=hidden, **({} if self.skip is None else {self.skip: hidden}))


class UNetOutput(Block):
    """hidden -> sample: norm, SiLU, the last convolution."""

    reads = ("hidden",)
    writes = ("sample",)

    def __init__(self, config: UNetConfig):
        super().__init__()
        self.norm = GroupNorm(config.channels[0], config.norm_groups, config.norm_eps)
        self.conv = Conv2d(config.channels[0], config.out_channels, 3, padding=1)

    def forward(self, state: State) -> State:
        return state.updated(sample=self.conv(F.silu(self.norm(state.hidden))))


class UNet(Model):
    """A UNet: `model(sample, timestep, encoder_hidden_states)` gives what the noise schedule predicts.

    Args:
        attention_core: see fmlab.models.attention.
    """

    CONFIG = UNetConfig
    PRESETS = UNET_PRESETS

    def __init__(self, config: UNetConfig, attention_core: AttentionCore = sdpa_core):
        super().__init__()
        self.config: UNetConfig = config
        self.blocks = nn.ModuleList(
            [
                UNetInput(config),
                *(
                    UNetResample(part)
                    if part.kind in ("downsample", "upsample")
                    else UNetLayer(part, config, attention_core)
                    for part in layout(config)
                ),
                UNetOutput(config),
            ]
        )
        self.finish()

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
    ) -> State:
        """Run all blocks.

        Args:
            sample: noisy images or latents [b,in_channels,h,w].
            timestep: [b], or one for all, [].
            encoder_hidden_states: the text [b,m,d].
            encoder_attention_mask: [b,m], 1 for text, 0 for padding. Stable Diffusion was trained without.

        Returns a State with `sample` [b,out_channels,h,w].
        """
        state = self.prepare(sample, timestep, encoder_hidden_states, encoder_attention_mask)
        for block in self.blocks:
            state = block(state)
        return state

    def prepare(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
    ) -> State:
        """Check a batch and make the State that the first block reads; arguments as for forward.

        Raises ValueError for shapes that do not agree with each other or with the model.
        """
        why = f"{len(self.config.channels)} levels, each half the size"
        check_image("sample", sample, self.config.in_channels, self.config.multiple, why)
        text = encoder_hidden_states
        if text is None or text.dim() != 3 or text.shape[0] != sample.shape[0] or not text.shape[1]:
            raise ValueError(
                f"encoder_hidden_states must be [batch, tokens, width] with the batch of sample, "
                f"{sample.shape[0]}, got {None if text is None else list(text.shape)}"
            )
        if text.shape[2] != self.config.text_size:
            raise ValueError(
                f"the text is {text.shape[2]} wide, the model's cross-attention {self.config.text_size}; "
                "use the text encoder that the model was trained with"
            )
        given = {} if encoder_attention_mask is None else {"encoder_attention_mask": encoder_attention_mask}
        if encoder_attention_mask is not None and encoder_attention_mask.shape != text.shape[:2]:
            raise ValueError(
                f"encoder_attention_mask must be {list(text.shape[:2])}, "
                f"got {list(encoder_attention_mask.shape)}"
            )
        check_values(given)
        timestep = batch_of_timesteps(timestep, sample.shape[0])
        return State(given, sample=sample, timestep=timestep, encoder_hidden=text)

    # ---- weights -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all weights anew: torch's defaults, and zeros for what writes into the stream.

        The second convolution of each residual block, the projection out of each transformer and the last
        convolution start at zero, as in the code of the latent diffusion paper.
        """
        reset_like_torch(self)
        for name, parameter in self.named_parameters():
            if (
                ".conv2." in name
                or ".leave." in name
                or name.startswith(f"blocks.{len(self.blocks) - 1}.conv.")
            ):
                parameter.zero_()

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        last = len(self.blocks) - 1
        rules = [
            Rule(r"blocks\.0\..*", "replicate"),
            Rule(rf"blocks\.{last}\..*", "replicate"),
        ]
        if len(self.config.channels) > 1:
            rules.append(Rule(r"blocks\.\d+\.resample\..*", "replicate"))
        for index, block in enumerate(self.blocks):
            if isinstance(block, UNetLayer):
                rules += block.rules(rf"blocks\.{index}")
        return ParallelPlan(tuple(rules), tied=(), cuts=tuple(range(1, len(self.blocks))))

    @classmethod
    def hf_format(cls) -> HFFormat:
        """diffusers' UNet2DConditionModel."""
        from fmlab.models.diffusion.unet_hf import FORMAT

        return FORMAT
