"""The blocks of the two towers of CLIP, their initial weights and their plan.

Both are pre-norm transformers (Radford et al. 2021, arXiv:2103.00020, section 2.4). The text tower is causal
and is pooled at the end-of-text token; it is the text encoder of Stable Diffusion. The image tower cuts the
image into patches, each of which becomes a token, and is pooled at a class token before them.

Shapes: b batch, l text length, n patches of an image, s = n + 1 image tokens, d hidden width, c channels,
p side of a patch.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fmlab.models.attention import AttentionCore, AttentionMask, bidirectional_mask, causal_mask
from fmlab.models.clip_config import CLIPTextConfig, CLIPVisionConfig
from fmlab.models.functions import linear
from fmlab.models.layers import MLP, Activation, Embedding, SelfAttention, add_residual
from fmlab.models.plan import Rule
from fmlab.models.state import Block, State, stream_length


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), CLIP's approximation of GELU; 0.845796 at 1, where GELU is 0.841345."""
    return _QuickGELU.apply(x)


class _QuickGELU(torch.autograd.Function):
    """Forward: silu(u) / 1.702 for u = 1.702 x. Backward: silu'(u), for which u is all that is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        u = x * 1.702
        ctx.save_for_backward(u)
        return F.silu(u).mul_(1 / 1.702)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(d_y, u)


_ACTIVATIONS: dict[str, Activation] = {"quick_gelu": quick_gelu, "gelu": F.gelu}


class TextEmbedding(Block):
    """input_ids -> text_hidden [b,l,d]: a token vector plus a position vector, positions always from 0."""

    reads = ("input_ids",)
    writes = ("text_hidden",)

    def __init__(self, config: CLIPTextConfig):
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.positions = Embedding(config.max_positions, config.hidden_size)

    def forward(self, state: State) -> State:
        positions_ld = self.positions.weight[: state.input_ids.shape[1]]
        return state.updated(text_hidden=self.tokens(state.input_ids) + positions_ld)


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Images [b,c,height,width] as rows of patches [b,n,c*p*p], left to right, then top to bottom."""
    b, c, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    cut = images.view(b, c, rows, patch_size, columns, patch_size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(b, rows * columns, -1)


class ImageEmbedding(Block):
    """pixel_values [b,c,h,w] -> image_hidden [b,s,d]: the class token and a vector for each patch, plus
    position vectors, normed.

    A convolution whose stride is its kernel size is one matrix applied to each patch, and faster so.
    """

    reads = ("pixel_values",)
    writes = ("image_hidden",)

    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        d, p = config.hidden_size, config.patch_size
        self.patches = nn.Parameter(torch.empty(d, config.channels, p, p))  # as a convolution has it
        self.class_token = nn.Parameter(torch.empty(d))
        self.positions = Embedding(config.patches + 1, d)
        self.norm = nn.LayerNorm(d, config.norm_eps)

    def forward(self, state: State) -> State:
        pixels = state.pixel_values
        patches_bnd = linear(patchify(pixels, self.patches.shape[-1]), self.patches.flatten(1))
        class_b1d = self.class_token.to(patches_bnd.dtype).expand(len(pixels), 1, -1)
        tokens_bsd = torch.cat([class_b1d, patches_bnd], 1) + self.positions.weight
        return state.updated(image_hidden=self.norm(tokens_bsd))


class CLIPLayer(Block):
    """One pre-norm layer of a tower: attention, then the feed-forward network."""

    stream: ClassVar[str]

    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, attention_core: AttentionCore):
        super().__init__()
        d = config.hidden_size
        self.attention_norm = nn.LayerNorm(d, config.norm_eps)
        self.attention = SelfAttention(d, d // config.num_heads, attention_core)
        self.mlp_norm = nn.LayerNorm(d, config.norm_eps)
        self.mlp = MLP(d, config.ffn_size or 4 * d, _ACTIVATIONS[config.activation])

    def mask(self, state: State, length: int) -> AttentionMask:
        raise NotImplementedError

    def forward(self, state: State) -> State:
        hidden = state[self.stream]
        mask = self.mask(state, stream_length(state, self.stream))
        update = self.attention(self.attention_norm(hidden), mask)
        hidden = add_residual(hidden, update, self.attention.output.bias)
        update = self.mlp(self.mlp_norm(hidden))
        hidden = add_residual(hidden, update, self.mlp.down.bias)
        return state.updated(**{self.stream: hidden})


class TextLayer(CLIPLayer):
    """text_hidden -> text_hidden; a token sees those before it."""

    stream = "text_hidden"
    reads = ("text_hidden", "attention_mask")
    writes = ("text_hidden",)

    def mask(self, state: State, length: int) -> AttentionMask:
        return causal_mask(state, length)


class ImageLayer(CLIPLayer):
    """image_hidden -> image_hidden; every token sees every other."""

    stream = "image_hidden"
    reads = ("image_hidden",)
    writes = ("image_hidden",)

    def mask(self, state: State, length: int) -> AttentionMask:
        return bidirectional_mask(state, length, padding="image_mask")  # no batch has one


class TextEnd(Block):
    """text_hidden -> text_hidden, normed, and text_pooled [b,d], its vector at the end-of-text token."""

    reads = ("text_hidden", "input_ids")
    writes = ("text_hidden", "text_pooled")

    def __init__(self, config: CLIPTextConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.eos_token_id = config.eos_token_id

    def forward(self, state: State) -> State:
        hidden_bld = self.norm(state.text_hidden)
        ids = state.input_ids
        marks_bl = ids if self.eos_token_id == 2 else (ids == self.eos_token_id).int()
        ends_b = marks_bl.argmax(-1)  # the first of several
        pooled_bd = hidden_bld[torch.arange(len(ids), device=ids.device), ends_b]
        return state.updated(text_hidden=hidden_bld, text_pooled=pooled_bd)


class ImageEnd(Block):
    """image_hidden -> image_pooled [b,d]: the class token, normed. image_hidden itself is never normed."""

    reads = ("image_hidden",)
    writes = ("image_pooled",)

    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, state: State) -> State:
        return state.updated(image_pooled=self.norm(state.image_hidden[:, 0]))


# ---- what the towers share with the models made of them ----------------------------------------------------


def text_tower(config: CLIPTextConfig, core: AttentionCore) -> list[Block]:
    """The blocks of a text tower."""
    layers = [TextLayer(config, core) for _ in range(config.num_layers)]
    return [TextEmbedding(config), *layers, TextEnd(config)]


def image_tower(config: CLIPVisionConfig, core: AttentionCore) -> list[Block]:
    """The blocks of an image tower."""
    layers = [ImageLayer(config, core) for _ in range(config.num_layers)]
    return [ImageEmbedding(config), *layers, ImageEnd(config)]


@torch.no_grad()
def reset_tower(blocks: Iterable[Block], layers: int) -> None:
    """Fill a tower's weights anew, as OpenAI's code fills the text tower: normal, biases 0, norms 1.

    The matrices that write into the residual stream get 1 / sqrt(2 * layers) of the others' deviation.
    transformers has that factor on the queries, keys and values instead of the attention's output.
    """
    for block in blocks:
        for name, parameter in block.named_parameters():
            width = parameter.shape[-1]
            residual = (2 * layers) ** -0.5
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name == "tokens.weight":
                parameter.normal_(0.0, 0.02)
            elif name == "positions.weight" and isinstance(block, TextEmbedding):
                parameter.normal_(0.0, 0.01)
            elif name == "patches":
                parameter.normal_(0.0, 0.02)
            elif name == "mlp.up.weight":
                parameter.normal_(0.0, (2 * width) ** -0.5)
            elif name == "mlp.down.weight":
                parameter.normal_(0.0, parameter.shape[0] ** -0.5 * residual)
            elif name == "attention.output.weight":
                parameter.normal_(0.0, width**-0.5 * residual)
            else:  # queries, keys and values, the class token, the image's positions
                parameter.normal_(0.0, width**-0.5)


def tower_rules(config: CLIPTextConfig | CLIPVisionConfig, start: int = 0) -> tuple[Rule, ...]:
    """The plan of a tower whose first block is number `start` of the model."""
    end = start + config.num_layers + 1
    layer = rf"blocks\.(?:{'|'.join(str(i) for i in range(start + 1, end))})"
    head = config.hidden_size // config.num_heads
    return (
        Rule(rf"blocks\.{start}\.tokens\.weight", "vocab")
        if isinstance(config, CLIPTextConfig)
        else Rule(rf"blocks\.{start}\.(patches|class_token|norm\..*)", "replicate"),
        Rule(rf"blocks\.{start}\.positions\.weight", "replicate"),
        Rule(rf"{layer}\..*norm\.(weight|bias)", "replicate"),
        Rule(rf"{layer}\.attention\.qkv\.(weight|bias)", "column", parts=3, unit=head),
        Rule(rf"{layer}\.attention\.output\.weight", "row", unit=head),
        Rule(rf"{layer}\.mlp\.up\.(weight|bias)", "column"),
        Rule(rf"{layer}\.mlp\.down\.weight", "row"),
        Rule(rf"{layer}\.(attention\.output|mlp\.down)\.bias", "replicate"),
        Rule(rf"blocks\.{end}\.norm\.(weight|bias)", "replicate"),
    )
