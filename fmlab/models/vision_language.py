"""A decoder that sees, in the manner of LLaVA: image tower, projector, Llama, top to bottom.

Liu et al. 2023, arXiv:2304.08485, with the two-layer projector of LLaVA 1.5 (arXiv:2310.03744). The patches
of an image, read off before the tower's last layer, are projected to the width of the decoder and put in the
place of as many image tokens of the prompt. The decoder cannot tell them from words.

Shapes: b batch, l length, i images of the batch, n patches of an image, s = n + 1, c channels, d width of the
decoder, v vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, KVCache, sdpa_core, token_positions
from fmlab.models.base import Model
from fmlab.models.clip_config import CLIPVisionConfig, check_images
from fmlab.models.clip_presets import VISION_PRESETS
from fmlab.models.clip_towers import image_tower, reset_tower, tower_rules
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.gpt import CrossEntropy
from fmlab.models.hf import HFFormat
from fmlab.models.inputs import check_positions, check_token_batch
from fmlab.models.layers import Linear, can_lend
from fmlab.models.llama import Llama, LlamaConfig, LlamaEmbedding, LlamaHead, LlamaLayer, fill_weights
from fmlab.models.llama_config import LLAMA_PRESETS
from fmlab.models.plan import ParallelPlan, Rule, Stream
from fmlab.models.state import Block, State


@dataclass(frozen=True)
class VisionLanguageConfig:
    """Shape of a vision-language decoder.

    Args:
        image_token_id: the token whose places the image takes.
        feature_layer: which output of the image tower is projected: -1 that of its last layer, -2 (LLaVA)
            that of the one before.
        keep_class_token: project the class token too, as a first patch.
    """

    vision: CLIPVisionConfig
    text: LlamaConfig
    image_token_id: int
    feature_layer: int = -2
    keep_class_token: bool = False

    def __post_init__(self) -> None:
        if not -self.vision.num_layers <= self.feature_layer <= -1:
            raise ValueError(
                f"feature_layer={self.feature_layer}: legal are -1 (the tower's last layer) to "
                f"{-self.vision.num_layers} (its first)"
            )
        if not 0 <= self.image_token_id < self.text.vocab_size:
            raise ValueError(
                f"image_token_id={self.image_token_id} is outside the decoder's vocabulary: legal "
                f"0..{self.text.vocab_size - 1}"
            )

    @property
    def image_layers(self) -> int:
        """How many layers of the image tower are run."""
        return self.vision.num_layers + 1 + self.feature_layer

    @property
    def image_tokens(self) -> int:
        """How many places of the prompt one image takes."""
        return self.vision.patches + self.keep_class_token

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def max_positions(self) -> int:
        return self.text.max_positions


class Unused(Block):
    """The layers of the image tower after the one that is read off: in the files, and never run."""

    def __init__(self, blocks: list[Block]):
        super().__init__()
        self.parts = nn.ModuleList(blocks)

    def forward(self, state: State) -> State:
        return state


class Projector(Block):
    """image_hidden [i,s,d'] -> image_features [i,n,d]: a linear layer, GELU, a linear layer."""

    reads = ("image_hidden",)
    writes = ("image_features",)

    def __init__(self, config: VisionLanguageConfig):
        super().__init__()
        self.first = Linear(config.vision.hidden_size, config.text.hidden_size)
        self.second = Linear(config.text.hidden_size, config.text.hidden_size)
        self.keep_class_token = config.keep_class_token

    def forward(self, state: State) -> State:
        hidden_ind = state.image_hidden if self.keep_class_token else state.image_hidden[:, 1:]
        return state.updated(image_features=self.second(F.gelu(self.first(hidden_ind))))


class ImageTextEmbedding(LlamaEmbedding):
    """input_ids, image_features -> hidden [b,l,d]: token vectors, and patches in the image tokens' places.

    The images fill the places in the order of rows and columns.
    """

    reads = ("input_ids", "image_features")  # type: ignore[assignment]

    def __init__(self, config: VisionLanguageConfig):
        super().__init__(config.text)
        self.image_token_id = config.image_token_id

    def forward(self, state: State) -> State:
        state = super().forward(state)
        if "image_features" not in state:
            return state
        hidden_bld = state.hidden
        places_bl1 = (state.input_ids == self.image_token_id).unsqueeze(-1)
        features = state.image_features.to(hidden_bld.dtype)
        return state.updated(hidden=hidden_bld.masked_scatter(places_bl1, features))


class VisionLanguage(Model):
    """A LLaVA: `model(input_ids, pixel_values)` gives logits; with labels, the sum of the losses.

    Args:
        attention_core, cross_entropy: as for Llama.
    """

    CONFIG = VisionLanguageConfig
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "llava-1.5-7b": dict(
            vision=CLIPVisionConfig(**{**VISION_PRESETS["clip-vit-l-14"], "image_size": 336}),
            text=LlamaConfig(**{**LLAMA_PRESETS["llama2-7b"], "vocab_size": 32064}),
            image_token_id=32000,
        ),
        # Ours, for laptops: the words and the 32-pixel images of fmlab.data.shapes.
        "vision-language-tiny": dict(
            vision=CLIPVisionConfig(**VISION_PRESETS["clip-tiny"]),
            text=LlamaConfig(**{**LLAMA_PRESETS["llama-tiny"], "vocab_size": 64, "max_positions": 64}),
            image_token_id=4,
        ),
    }
    TOKEN_TABLES = (r"blocks\.\d+\.tokens\.weight",)
    POSITION_TABLES = (r"blocks\.0\.positions\.weight",)

    def __init__(
        self,
        config: VisionLanguageConfig,
        attention_core: AttentionCore = sdpa_core,
        cross_entropy: CrossEntropy = linear_cross_entropy,
    ):
        super().__init__()
        self.config: VisionLanguageConfig = config
        tower, run, text = image_tower(config.vision, attention_core), config.image_layers + 1, config.text
        self.text_start = run + 2  # the number of the decoder's first block
        decoder = [LlamaLayer(text, index, attention_core) for index in range(text.num_layers)]
        self.blocks = nn.ModuleList(
            [
                *tower[:run],
                Unused(tower[run:]),
                Projector(config),
                ImageTextEmbedding(config),
                *decoder,
                LlamaHead(text, cross_entropy),
            ]
        )
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> State:
        """Run all blocks, or without images those of the decoder.

        Args:
            input_ids: [b,l], with config.image_tokens image tokens for each image.
            pixel_values: [i,c,h,w], the images in the order of their places.
            labels: [b,l], the token that follows each input, ALREADY SHIFTED; -100 where nothing is to be
                learnt: the image, and the prompt.
            attention_mask: [b,l], 1 real, 0 padding. With a cache it describes the new tokens only.
            cache: filled and read; the images belong to the first call. No gradient comes out of such a call.

        Returns a State with `logits` [b,l,v], or with `loss_sum` if labels were given.
        """
        state = self.prepare(input_ids, pixel_values, labels, attention_mask, cache)
        if labels is not None and can_lend(self.embedding.tokens, self.head.tokens, self.head.cross_entropy):
            state.derived["one gradient for the tied table"] = True
        blocks = self.blocks if pixel_values is not None else self.blocks[self.text_start :]
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            for block in blocks:
                state = block(state)
        if cache is not None:
            cache.finish(input_ids.shape[1])
        return state

    def prepare(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> State:
        """Check a batch and make the State that the first block reads; arguments as for forward.

        Raises ValueError for shapes that do not agree, and unless the images fill the image tokens exactly.
        """
        optional = dict(labels=labels, attention_mask=attention_mask)
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        check_token_batch(input_ids, given, cache, self.config.max_positions)
        self._check_places(input_ids, pixel_values)
        if pixel_values is not None:
            given["pixel_values"] = pixel_values
        past = cache.begin(input_ids.shape[1], attention_mask) if cache is not None else None
        given["position_ids"] = token_positions(input_ids, attention_mask, None, past)
        check_positions(given["position_ids"], self.config.max_positions)
        return State(given, input_ids=input_ids, cache=cache)

    def _check_places(self, input_ids: Tensor, pixel_values: Tensor | None) -> None:
        images = 0
        if pixel_values is not None:
            check_images(self.config.vision, pixel_values)
            images = len(pixel_values)
        if torch.compiler.is_compiling() or input_ids.device.type != "cpu":
            return
        places, needed = int((input_ids == self.config.image_token_id).sum()), self.config.image_tokens
        if places != images * needed:
            raise ValueError(
                f"{images} images need {images} * {needed} = {images * needed} image tokens "
                f"({self.config.image_token_id}) in input_ids, which has {places}"
            )

    def new_cache(self, batch: int, max_length: int | None = None) -> KVCache:
        """An empty key/value cache for `batch` rows of up to `max_length` tokens, image tokens included."""
        text = self.config.text
        max_length = text.max_positions if max_length is None else max_length
        if max_length > text.max_positions:
            raise ValueError(f"max_length={max_length} exceeds the model's {text.max_positions} positions")
        weight = self.get_parameter(f"blocks.{self.text_start + 1}.attention.key_value.weight")
        heads = weight.shape[0] // (2 * text.head_width)  # of this rank, if the heads are divided
        return KVCache(
            text.num_layers, batch, heads, max_length, text.head_width, weight.dtype, weight.device
        )

    def looking_at(self, pixel_values: Tensor) -> "Looking":
        """This model with its eyes on these images, for fmlab.train.generate_ids."""
        return Looking(self, pixel_values)

    def freeze_vision(self, frozen: bool = True) -> "VisionLanguage":
        """Keep the image tower as it is while the projector and the decoder learn; returns the model."""
        for parameter in self.blocks[: self.text_start - 1].parameters():
            parameter.requires_grad_(not frozen)
        return self

    # ---- weights -------------------------------------------------------------------------------------------

    @property
    def embedding(self) -> ImageTextEmbedding:
        return cast(ImageTextEmbedding, self.blocks[self.text_start])

    @property
    def head(self) -> LlamaHead:
        return cast(LlamaHead, self.blocks[-1])

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The decoder's output matrix is its token embedding, if its config says so."""
        tied = (f"blocks.{self.text_start}.tokens.weight", f"blocks.{len(self.blocks) - 1}.tokens.weight")
        return (tied,) if self.config.text.tie_embeddings else ()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all weights anew: the tower as CLIP's, the decoder as a Llama's, the projector normal with the
        decoder's init_std and without bias."""
        tower = self.blocks[: self.text_start - 2]
        unused = cast(Unused, self.blocks[self.text_start - 2]).parts
        reset_tower([*tower, *unused], self.config.vision.num_layers)
        fill_weights(self.blocks[self.text_start - 1 :].named_parameters(), self.config.text)

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        start = self.text_start
        tower = tower_rules(replace(self.config.vision, num_layers=self.config.image_layers))
        decoder = rf"(?=blocks\.(?:{'|'.join(str(i) for i in range(start, len(self.blocks)))})\.)"
        with torch.device("meta"):
            text_rules = Llama(self.config.text).parallel_plan().rules
        return ParallelPlan(
            rules=(
                *tower[:-1],  # all but the norm after the last layer, which is among the unused
                Rule(rf"blocks\.(?:{start - 2}|{start - 1})\..*", "replicate"),
                *(replace(rule, pattern=decoder + rule.pattern) for rule in text_rules),
            ),
            tied=self.ties(),
            cuts=tuple(range(1, len(self.blocks))),
            streams=(Stream("hidden", "input_ids", (start + 1, len(self.blocks) - 1)),),
        )

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' LlavaForConditionalGeneration."""
        from fmlab.models.vision_language_hf import FORMAT

        return FORMAT


class Looking:
    """A vision-language model and the images of one generation, called like a language model."""

    def __init__(self, model: VisionLanguage, pixel_values: Tensor):
        self.model, self.pixel_values, self.config = model, pixel_values, model.config

    def __call__(self, input_ids: Tensor, cache: KVCache, attention_mask: Tensor | None = None) -> State:
        """The images go into the first call, with the prompt; later ones find them in the cache."""
        images = self.pixel_values if cache.length == 0 else None
        return self.model(input_ids, images, attention_mask=attention_mask, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
