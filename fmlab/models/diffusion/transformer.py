"""The transformer inside the UNet: pixels attend to each other and to the text.

Rombach et al. 2022 (arXiv:2112.10752), section 3.3 and appendix E.2.1.

Shapes: b batch, c channels, h height, w width, l = h * w pixels as tokens, m text tokens, d text width.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fmlab.models.attention import AttentionCore, AttentionMask
from fmlab.models.diffusion.blocks import GroupNorm
from fmlab.models.diffusion.convolution import Conv2d, pixels_to_tokens, tokens_to_pixels
from fmlab.models.functions import linear
from fmlab.models.layers import GroupedAttention, Linear, SelfAttention, add_residual
from fmlab.models.plan import Rule


class GEGLU(nn.Module):
    """down(value * gelu(gate)) without the bias of `down` (Shazeer 2020, arXiv:2002.05202).

    `up` holds the value's matrix above the gate's, and the GELU is exact, as in Stable Diffusion's files.
    """

    def __init__(self, hidden_size: int, ffn_size: int):
        super().__init__()
        self.up = Linear(hidden_size, 2 * ffn_size)
        self.down = Linear(ffn_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down.product(gated_gelu(self.up(x)))


def gated_gelu(value_gate: Tensor) -> Tensor:
    """[...,2f] -> [...,f]: the first half times the GELU of the second."""
    if torch.compiler.is_compiling():
        value, gate = value_gate.chunk(2, -1)
        return value * F.gelu(gate)
    return _GatedGELU.apply(value_gate)


class _GatedGELU(torch.autograd.Function):
    """Forward: value * gelu(gate). Backward: both halves of the gradient in one tensor.

    The GELU is worked out again, so that of the three tensors of this step only the input is kept.
    """

    @staticmethod
    def forward(ctx: Any, value_gate: Tensor) -> Tensor:
        ctx.save_for_backward(value_gate)
        value, gate = value_gate.chunk(2, -1)
        return F.gelu(gate).mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (value_gate,) = ctx.saved_tensors
        value, gate = value_gate.chunk(2, -1)
        d_value_gate = torch.empty_like(value_gate)
        d_value, d_gate = d_value_gate.chunk(2, -1)
        torch.mul(F.gelu(gate), d_out, out=d_value)
        torch.ops.aten.gelu_backward.grad_input(d_out * value, gate, approximate="none", grad_input=d_gate)
        return d_value_gate


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention to the text, feed-forward; each normed first, added to the stream."""

    def __init__(self, size: int, heads: int, text_size: int, core: AttentionCore):
        super().__init__()
        self.head_size = size // heads
        self.attention_norm = nn.LayerNorm(size)
        self.attention = SelfAttention(size, self.head_size, core, bias=False, output_bias=True)
        self.cross_norm = nn.LayerNorm(size)
        self.cross = GroupedAttention(
            size, self.head_size, heads, core, memory_size=text_size, bias=False, output_bias=True
        )
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp = GEGLU(size, 4 * size)

    def forward(
        self, hidden: Tensor, text: Tensor, pixels_mask: AttentionMask, text_mask: AttentionMask
    ) -> Tensor:
        """hidden [b,l,c], text [b,m,d] -> [b,l,c]."""
        update = self.attention(self.attention_norm(hidden), pixels_mask)
        hidden = add_residual(hidden, update, self.attention.output.bias)
        update = self.cross(self.cross_norm(hidden), text_mask, memory=text)
        hidden = add_residual(hidden, update, self.cross.output.bias)
        update = self.mlp(self.mlp_norm(hidden))
        return add_residual(hidden, update, self.mlp.down.bias)

    def rules(self, name: str) -> tuple[Rule, ...]:
        """How the weights of this layer, called `name`, may be divided: by heads and hidden units."""
        head = self.head_size
        return (
            Rule(rf"{name}\.\w+_norm\.(weight|bias)", "replicate"),
            Rule(rf"{name}\.attention\.qkv\.weight", "column", parts=3, unit=head),
            Rule(rf"{name}\.cross\.query\.weight", "column", unit=head),
            Rule(rf"{name}\.cross\.key_value\.weight", "column", parts=2, unit=head),
            Rule(rf"{name}\.(attention|cross)\.output\.weight", "row", unit=head),
            Rule(rf"{name}\.mlp\.up\.(weight|bias)", "column", parts=2),
            Rule(rf"{name}\.mlp\.down\.weight", "row"),
            Rule(rf"{name}\.(attention\.output|cross\.output|mlp\.down)\.bias", "replicate"),
        )


class SpatialTransformer(nn.Module):
    """x + project(layers(project(norm(x)))), the pixels as tokens.

    Args:
        linear_projection: Stable Diffusion 2 keeps the projections as matrices, 1 as 1x1 convolutions; the
            mathematics is the same.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        text_size: int,
        groups: int,
        core: AttentionCore,
        linear_projection: bool,
    ):
        super().__init__()

        def projection() -> Linear | Conv2d:
            return Linear(channels, channels) if linear_projection else Conv2d(channels, channels, 1)

        self.norm = GroupNorm(channels, groups, eps=1e-6)
        self.enter = projection()
        self.layers = nn.ModuleList([TransformerLayer(channels, heads, text_size, core)])
        self.leave = projection()

    def forward(self, x_bchw: Tensor, text: Tensor, text_real: Tensor | None = None) -> Tensor:
        """x [b,c,h,w], text [b,m,d], text_real bool [b,m] (None: all) -> [b,c,h,w]."""
        height, width = x_bchw.shape[2:]
        pixels = height * width
        pixels_mask = AttentionMask(False, pixels, pixels)
        text_mask = AttentionMask(False, pixels, text.shape[1], text_real)
        hidden_blc = _project(pixels_to_tokens(self.norm(x_bchw)), self.enter)
        for layer in self.layers:
            hidden_blc = layer(hidden_blc, text, pixels_mask, text_mask)
        return x_bchw + tokens_to_pixels(_project(hidden_blc, self.leave), height, width)

    def rules(self, name: str) -> tuple[Rule, ...]:
        """How the weights of this part, called `name`, may be divided."""
        own = Rule(rf"{name}\.(norm|enter|leave)\.(weight|bias)", "replicate")
        layer = cast(TransformerLayer, self.layers[0])
        return (own, *layer.rules(rf"{name}\.layers\.0"))


def _project(x_blc: Tensor, projection: Linear | Conv2d) -> Tensor:
    """A matrix, or a 1x1 convolution, which is the same matrix applied to each pixel."""
    return linear(x_blc, projection.weight.flatten(1), projection.bias)
