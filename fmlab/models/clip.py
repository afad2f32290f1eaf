"""CLIP, top to bottom: an image tower, a text tower, and the space in which their outputs are compared.

Radford et al. 2021, arXiv:2103.00020. The model gives unit vectors for images and for texts; the product of
two of them, times a learned scale, is how well they fit. fmlab.objectives.Contrastive trains it.

Shapes: b batch, l text length, c channels, d hidden width of a tower, e width of the common space.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, sdpa_core
from fmlab.models.base import Model, check_sizes
from fmlab.models.clip_config import CLIPTextConfig, CLIPVisionConfig, check_images, check_text
from fmlab.models.clip_presets import PROJECTIONS, TEXT_PRESETS, VISION_PRESETS
from fmlab.models.clip_towers import image_tower, reset_tower, text_tower, tower_rules
from fmlab.models.hf import HFFormat
from fmlab.models.layers import Linear
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block, State

INITIAL_SCALE = math.log(1 / 0.07)  # section 2.5: a temperature of 0.07
MOST_SCALE = 4.60517  # ln 100, rounded down: "clipped to prevent scaling the logits by more than 100"


@dataclass(frozen=True)
class CLIPConfig:
    """Shape of a CLIP: its two towers, and the width of the space that both are projected into."""

    text: CLIPTextConfig
    vision: CLIPVisionConfig
    projection_size: int = 512

    def __post_init__(self) -> None:
        check_sizes(self, "projection_size")


class CLIPHead(Block):
    """image_pooled, text_pooled -> image_embeddings, text_embeddings [b,e] of length 1, and logit_scale [].

    The parameter is the logarithm of the scale, so that a step multiplies it; unbounded it grows until the
    loss is NaN.
    """

    reads = ("image_pooled", "text_pooled")
    writes = ("image_embeddings", "text_embeddings", "logit_scale")

    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.image_projection = Linear(config.vision.hidden_size, config.projection_size, bias=False)
        self.text_projection = Linear(config.text.hidden_size, config.projection_size, bias=False)
        self.log_scale = nn.Parameter(torch.empty(()))

    def forward(self, state: State) -> State:
        made = {}
        if "image_pooled" in state:
            made["image_embeddings"] = _unit(self.image_projection(state.image_pooled))
        if "text_pooled" in state:
            made["text_embeddings"] = _unit(self.text_projection(state.text_pooled))
        if self.training and torch.is_grad_enabled():
            # The parameter itself is brought back after a step, as in the paper: the clamp below has no
            # gradient above its bound, so that a parameter beyond it could never return.
            with torch.no_grad():
                self.log_scale.clamp_(max=MOST_SCALE)
        return state.updated(**made, logit_scale=self.log_scale.clamp(max=MOST_SCALE).exp())


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1 in fp32 or wider: what follows is a softmax of their products times up to 100."""
    if x.dtype.itemsize < 4:
        x = x.float()
    return x / x.norm(dim=-1, keepdim=True)


class CLIP(Model):
    """A CLIP: `model(pixel_values, input_ids)` gives image_embeddings, text_embeddings and logit_scale.

    One list of blocks: the image tower, the text tower, the head. The two towers know nothing of each other,
    so a pipeline may cut anywhere.
    """

    CONFIG = CLIPConfig
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        name: dict(
            text=CLIPTextConfig(**TEXT_PRESETS[name]),
            vision=CLIPVisionConfig(**VISION_PRESETS[name]),
            projection_size=width,
        )
        for name, width in PROJECTIONS.items()
    }
    TOKEN_TABLES = (r"blocks\.\d+\.tokens\.weight",)
    POSITION_TABLES = (r"blocks\.\d+\.positions\.weight",)

    def __init__(self, config: CLIPConfig, attention_core: AttentionCore = sdpa_core):
        super().__init__()
        self.config: CLIPConfig = config
        image = image_tower(config.vision, attention_core)
        text = text_tower(config.text, attention_core)
        self.text_start = len(image)  # the number of the text tower's first block
        self.blocks = nn.ModuleList([*image, *text, CLIPHead(config)])
        self.finish()

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> State:
        """Run all blocks.

        Args:
            pixel_values: [b,c,h,w], normalised. input_ids: [b,l], each row with an end-of-text token; the two
                batches may differ in size. attention_mask: [b,l], 1 real, 0 padding; not needed for padding
                after the end-of-text token, which cannot be seen from there.

        Returns a State with `image_embeddings` and `text_embeddings` [b,e], of length 1 and in the dtype of
        the weights but at least fp32, and `logit_scale` [], the factor itself, at most 100.
        """
        state = self.prepare(pixel_values, input_ids, attention_mask)
        for block in self.blocks:
            state = block(state)
        return state

    def prepare(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> State:
        """Check a batch and make the State that the first block reads. Raises ValueError with the reason."""
        check_images(self.config.vision, pixel_values)
        return self._text_state(input_ids, attention_mask).updated(pixel_values=pixel_values)

    def encode_images(self, pixel_values: Tensor) -> Tensor:
        """The unit vectors of images alone, [b,e]."""
        check_images(self.config.vision, pixel_values)
        state = State(pixel_values=pixel_values)
        for block in (*self.blocks[: self.text_start], self.blocks[-1]):
            state = block(state)
        return state.image_embeddings

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The unit vectors of texts alone, [b,e]."""
        state = self._text_state(input_ids, attention_mask)
        for block in self.blocks[self.text_start :]:
            state = block(state)
        return state.text_embeddings

    def _text_state(self, input_ids: Tensor, attention_mask: Tensor | None) -> State:
        check_text(self.config.text, input_ids, attention_mask)
        eos = self.config.text.eos_token_id
        readable = input_ids.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and eos != 2 and not (ends_b := (input_ids == eos).any(1)).all():
            raise ValueError(
                f"row {int(ends_b.int().argmin())} of input_ids has no end-of-text token ({eos}), at which a "
                "text is read off; end every row with it before the padding"
            )
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        return State(given, input_ids=input_ids)

    # ---- weights -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all weights anew: the towers as in clip_towers.reset_tower, the projections normal with
        d^-1/2, the scale 1 / 0.07."""
        config, start = self.config, self.text_start
        reset_tower(self.blocks[:start], config.vision.num_layers)  # type: ignore[arg-type]
        reset_tower(self.blocks[start:-1], config.text.num_layers)  # type: ignore[arg-type]
        for name, parameter in self.blocks[-1].named_parameters():
            if name == "log_scale":
                parameter.fill_(INITIAL_SCALE)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        head = Rule(rf"blocks\.{len(self.blocks) - 1}\..*", "replicate")
        towers = tower_rules(self.config.vision) + tower_rules(self.config.text, self.text_start)
        return ParallelPlan((*towers, head), (), tuple(range(1, len(self.blocks))))

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' CLIPModel."""
        from fmlab.models.clip_hf import FORMAT

        return FORMAT
