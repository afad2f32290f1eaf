"""DiT, a transformer in the UNet's place, top to bottom: config, patches, layers, and a loop over them.

Peebles and Xie 2022, arXiv:2212.09748: the image is cut into patches, and time and class steer every layer
through shifts, scales and gates that start at zero (adaLN-Zero, section 3.2). With `text_size` the layers
look at a text instead of a class, by the paper's cross-attention block.

diffusers' DiTTransformer2DModel departs from the paper's code in three places; the config can say either:

- each layer has time and class embeddings of its own (`embedder_per_layer`), which the paper shares;
- its slowest wave of the time has the frequency 1/10000, the paper's 10000^(-127/128) (`frequency_shift` 1
  instead of 0);
- the norm before the feed-forward has an epsilon of 1e-5 by default (`mlp_norm_eps`), the paper's 1e-6.

Shapes: b batch, c channels, h height, w width, l patches, d hidden width, p patch size, m text tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, AttentionMask, sdpa_core
from fmlab.models.base import Model, check_heads, check_sizes
from fmlab.models.diffusion.blocks import check_image
from fmlab.models.diffusion.convolution import Conv2d, pixels_to_tokens
from fmlab.models.diffusion.presets import DIT_PRESETS
from fmlab.models.diffusion.timestep import TimestepEmbedding, batch_of_timesteps
from fmlab.models.hf import HFFormat
from fmlab.models.inputs import check_values
from fmlab.models.layers import MLP, Embedding, GroupedAttention, Linear, SelfAttention, add_residual
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block, State

WAVES = 256  # width of the time's waves
EPS = 1e-6


@dataclass(frozen=True)
class DiTConfig:
    """Shape of a DiT. Raises ValueError for shapes that cannot be.

    Args:
        out_channels: 2 * in_channels if the variances are predicted too, as the published models do.
        sample_size: height and width it was trained for; others are legal.
        num_classes: class labels are 0..num_classes-1, and `num_classes` itself means "no class", for
            guidance. None for none.
        text_size: width of a text's hidden states, to be looked at by every layer; None for none.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 8
    sample_size: int = 32
    num_classes: int | None = 1000
    text_size: int | None = None
    frequency_shift: float = 0.0
    embedder_per_layer: bool = False
    mlp_norm_eps: float = EPS

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_heads", "patch_size", "in_channels", "out_channels")
        optional = [name for name in ("num_classes", "text_size") if getattr(self, name) is not None]
        check_sizes(self, *sizes, "sample_size", *optional)
        check_heads(self.hidden_size, self.num_heads)
        if self.hidden_size % 4:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be divisible by 4 (waves of rows and columns)"
            )
        if len(optional) > 1:
            raise ValueError("give num_classes or text_size, not both: a DiT has one kind of condition")
        if self.sample_size % self.patch_size:
            raise ValueError(f"patch_size={self.patch_size} does not divide sample_size={self.sample_size}")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def patch_positions(height: int, width: int, size: int, base: int, device: torch.device) -> Tensor:
    """Fixed positions of height * width patches, fp32 [l,size]: waves of the column, then of the row.

    Args:
        base: patches on a side in training; other images are stretched over the same positions.
    """
    omega = torch.arange(size // 4, dtype=torch.float64, device=device) / (size / 4.0)
    waves = []
    for count, other, is_row in ((width, height, False), (height, width, True)):
        at = torch.arange(count, dtype=torch.float32, device=device) / (count / base)
        at = at.repeat_interleave(other) if is_row else at.repeat(other)
        angle = torch.outer(at.double(), 1.0 / 10000**omega)
        waves += [angle.sin(), angle.cos()]
    return torch.cat(waves, 1).float()


class Condition(nn.Module):
    """timestep [b], class_labels [b] -> silu(time + class) [b,d]: what shifts, scales and gates come from."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.time = TimestepEmbedding(WAVES, config.hidden_size, config.frequency_shift)
        self.classes = None
        if config.num_classes is not None:
            self.classes = Embedding(config.num_classes + 1, config.hidden_size)

    def forward(self, state: State) -> Tensor:
        condition_bd = self.time(state.timestep)
        if self.classes is not None:
            condition_bd = condition_bd + self.classes(state.class_labels)
        return F.silu(condition_bd)


def modulated(x_bld: Tensor, shift_bd: Tensor, scale_bd: Tensor, eps: float) -> Tensor:
    """The norm of x, without weights, times (1 + scale), plus shift."""
    normed = F.layer_norm(x_bld, x_bld.shape[-1:], eps=eps)
    return torch.addcmul(shift_bd[:, None], normed, 1 + scale_bd[:, None])


class DiTInput(Block):
    """sample, timestep (, class_labels) -> hidden, condition: patches with their positions; the condition."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        self.patch = Conv2d(config.in_channels, config.hidden_size, config.patch_size, config.patch_size)
        self.condition = None if config.embedder_per_layer else Condition(config)
        self.reads = ("sample", "timestep", "class_labels") if self.condition else ("sample",)
        self.writes = ("hidden", "condition") if self.condition else ("hidden",)

    def forward(self, state: State) -> State:
        hidden_bdhw = self.patch(state.sample.contiguous(memory_format=torch.channels_last))
        height, width = hidden_bdhw.shape[2:]
        base, device = self.config.sample_size // self.config.patch_size, hidden_bdhw.device
        positions_ld = patch_positions(height, width, self.config.hidden_size, base, device)
        state = state.updated(hidden=pixels_to_tokens(hidden_bdhw) + positions_ld.to(hidden_bdhw.dtype))
        return state.updated(condition=self.condition(state)) if self.condition is not None else state


class DiTLayer(Block):
    """hidden, condition -> hidden: attention, (a look at the text,) feed-forward; steered by the condition.

    With an embedder per layer it makes its own condition; the first one's also serves the last block.
    """

    def __init__(self, config: DiTConfig, index: int, attention_core: AttentionCore):
        super().__init__()
        size, head, text = config.hidden_size, config.head_size, config.text_size
        self.eps = config.mlp_norm_eps
        self.condition = Condition(config) if config.embedder_per_layer else None
        self.keeps = self.condition is not None and index == 0
        self.modulation = Linear(size, 6 * size)
        self.attention = SelfAttention(size, head, attention_core)
        self.cross_norm = self.cross = None
        if text is not None:
            self.cross_norm = nn.LayerNorm(size, EPS)
            self.cross = GroupedAttention(size, head, config.num_heads, attention_core, memory_size=text)
        self.mlp = MLP(size, 4 * size)
        needs = ("timestep", "class_labels") if self.condition else ("condition",)
        self.reads = ("hidden", *needs, *(("encoder_hidden", "encoder_attention_mask") if text else ()))
        self.writes = ("hidden", "condition") if self.keeps else ("hidden",)

    def forward(self, state: State) -> State:
        condition_bd = state.condition if self.condition is None else self.condition(state)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition_bd).chunk(6, -1)
        hidden = state.hidden  # [b,l,d]
        everywhere = AttentionMask(False, hidden.shape[1], hidden.shape[1])
        update = self.attention(modulated(hidden, shift, scale, EPS), everywhere)
        update = update + self.attention.output.bias.to(update.dtype)
        hidden = torch.addcmul(hidden, gate[:, None], update)
        if self.cross is not None and self.cross_norm is not None:
            text, real = state.encoder_hidden, state.get("encoder_attention_mask")
            mask = AttentionMask(False, hidden.shape[1], text.shape[1], None if real is None else real.bool())
            update = self.cross(self.cross_norm(hidden), mask, memory=text)
            hidden = add_residual(hidden, update, self.cross.output.bias)
        update = self.mlp(modulated(hidden, mlp_shift, mlp_scale, self.eps))
        update = update + self.mlp.down.bias.to(update.dtype)
        hidden = torch.addcmul(hidden, mlp_gate[:, None], update)
        return state.updated(hidden=hidden, **({"condition": condition_bd} if self.keeps else {}))


class DiTOutput(Block):
    """hidden, condition, sample (its size) -> sample: the last steered norm, and patches back to pixels."""

    reads = ("hidden", "condition", "sample")
    writes = ("sample",)

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.patch_size = config.patch_size
        self.modulation = Linear(config.hidden_size, 2 * config.hidden_size)
        self.pixels = Linear(config.hidden_size, config.patch_size**2 * config.out_channels)

    def forward(self, state: State) -> State:
        shift, scale = self.modulation(state.condition).chunk(2, -1)
        pixels_blx = self.pixels(modulated(state.hidden, shift, scale, EPS))
        p = self.patch_size
        height, width = (side // p for side in state.sample.shape[2:])
        patches = pixels_blx.view(len(pixels_blx), height, width, p, p, -1)  # [b,h,w,p,p,c]
        return state.updated(sample=patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3))


class DiT(Model):
    """A DiT: `model(sample, timestep, class_labels=...)`, or with a text as a UNet.

    Args:
        attention_core: see fmlab.models.attention.
    """

    CONFIG = DiTConfig
    PRESETS = DIT_PRESETS

    def __init__(self, config: DiTConfig, attention_core: AttentionCore = sdpa_core):
        super().__init__()
        self.config: DiTConfig = config
        layers = [DiTLayer(config, index, attention_core) for index in range(config.num_layers)]
        self.blocks = nn.ModuleList([DiTInput(config), *layers, DiTOutput(config)])
        self.finish()

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        class_labels: Tensor | None = None,
    ) -> State:
        """Run all blocks.

        Args:
            sample: noisy images or latents [b,in_channels,h,w].
            timestep: [b], or one for all, [].
            encoder_hidden_states: the text [b,m,text_size], for a model with text_size.
            encoder_attention_mask: [b,m], 1 for text, 0 for padding.
            class_labels: [b], for a model with num_classes.

        Returns a State with `sample` [b,out_channels,h,w].
        """
        state = self.prepare(sample, timestep, encoder_hidden_states, encoder_attention_mask, class_labels)
        for block in self.blocks:
            state = block(state)
        return state

    def prepare(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        class_labels: Tensor | None = None,
    ) -> State:
        """Check a batch and make the State that the first block reads; arguments as for forward.

        Raises ValueError for shapes that do not agree, and conditions that the model has not or lacks.
        """
        patch = self.config.patch_size
        check_image("sample", sample, self.config.in_channels, patch, f"patches of {patch}x{patch}")
        batch, width = sample.shape[0], self.config.text_size
        shapes: dict[str, tuple[Tensor | None, bool, list[Any]]] = {
            "class_labels": (class_labels, self.config.num_classes is not None, [batch]),
            "encoder_hidden_states": (encoder_hidden_states, width is not None, [batch, "tokens", width]),
        }
        for name, (tensor, wanted, shape) in shapes.items():
            if (tensor is not None) != wanted:
                does = "needs" if wanted else "has no use for"
                raise ValueError(
                    f"this DiT {does} {name} (num_classes={self.config.num_classes}, text_size={width})"
                )
            if tensor is not None and not _fits(tensor, shape):
                raise ValueError(f"{name} must be {shape}, got {list(tensor.shape)}")
        given = {"class_labels": class_labels, "encoder_hidden": encoder_hidden_states}
        if encoder_attention_mask is not None:
            text = encoder_hidden_states
            if text is None or encoder_attention_mask.shape != text.shape[:2]:
                raise ValueError("encoder_attention_mask must be [batch, tokens] of encoder_hidden_states")
            given["encoder_attention_mask"] = encoder_attention_mask
        timestep = batch_of_timesteps(timestep, batch)
        names = {name: tensor for name, tensor in given.items() if tensor is not None}
        check_values(names)
        return State(names, sample=sample, timestep=timestep)

    # ---- weights -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all weights anew, as the paper's code does.

        Xavier-uniform matrices (the fused query-key-value matrix as one, the patches as a matrix), biases 0,
        0.02 for time and class, and zeros for modulations, the last matrix, and what comes from the text.
        """
        zero = (".modulation.", ".pixels.", ".cross.output.")
        for name, parameter in self.named_parameters():
            if name.endswith(".bias") or any(part in name for part in zero):
                parameter.zero_()
            elif ".condition." in name:
                parameter.normal_(0.0, 0.02)
            elif ".cross_norm." in name:
                parameter.fill_(1.0)
            else:
                bound = (6.0 / (parameter.shape[0] + parameter[0].numel())) ** 0.5
                parameter.uniform_(-bound, bound)

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        head = self.config.head_size
        rules = [
            Rule(r"blocks\.\d+\.(patch|condition|modulation|pixels)\..*", "replicate"),
            Rule(r"blocks\.\d+\.attention\.qkv\.(weight|bias)", "column", parts=3, unit=head),
            Rule(r"blocks\.\d+\.mlp\.up\.(weight|bias)", "column"),
            Rule(r"blocks\.\d+\.attention\.output\.weight", "row", unit=head),
            Rule(r"blocks\.\d+\.mlp\.down\.weight", "row"),
            Rule(r"blocks\.\d+\.(attention\.output|mlp\.down)\.bias", "replicate"),
        ]
        if self.config.text_size is not None:
            rules += [
                Rule(r"blocks\.\d+\.cross_norm\.(weight|bias)", "replicate"),
                Rule(r"blocks\.\d+\.cross\.query\.(weight|bias)", "column", unit=head),
                Rule(r"blocks\.\d+\.cross\.key_value\.(weight|bias)", "column", parts=2, unit=head),
                Rule(r"blocks\.\d+\.cross\.output\.weight", "row", unit=head),
                Rule(r"blocks\.\d+\.cross\.output\.bias", "replicate"),
            ]
        return ParallelPlan(tuple(rules), tied=(), cuts=tuple(range(1, len(self.blocks))))

    @classmethod
    def hf_format(cls) -> HFFormat:
        """diffusers' DiTTransformer2DModel."""
        from fmlab.models.diffusion.dit_hf import FORMAT

        return FORMAT


def _fits(tensor: Tensor, shape: list[Any]) -> bool:
    sizes = zip(tensor.shape, shape, strict=False)
    return tensor.dim() == len(shape) and all(size == n or (isinstance(n, str) and size) for size, n in sizes)
