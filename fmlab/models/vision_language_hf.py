"""Vision-language decoders in Hugging Face's LLaVA format (transformers' LlavaForConditionalGeneration)."""

import re
from dataclasses import replace
from typing import Any

from fmlab.models import llama_hf
from fmlab.models.clip_hf import vision_from_fields, vision_to_fields, vision_weights
from fmlab.models.hf import HFFormat, Weight, refuse_other_than
from fmlab.models.vision_language import VisionLanguageConfig

_FIXED = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True}
# Where the parts stand in released files; in memory transformers 5 calls them otherwise.
TOWER, PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."
DECODER, HEAD = "language_model.model.", "language_model.lm_head."


def weights(
    config: VisionLanguageConfig,
    tower: str = TOWER,
    projector: str = PROJECTOR,
    decoder: str = DECODER,
    head: str = HEAD,
) -> list[Weight]:
    """Our names beside theirs."""
    run = config.image_layers + 1  # blocks of the tower that are run; block number `run` holds the rest
    pairs = [_place(weight, run) for weight in vision_weights(config.vision, 0, tower)]
    for ours, theirs in (("first", "linear_1"), ("second", "linear_2")):
        pairs += [
            Weight(f"blocks.{run + 1}.{ours}.{kind}", f"{projector}{theirs}.{kind}")
            for kind in ("weight", "bias")
        ]
    for weight in llama_hf.weights(config.text):
        block, _, rest = weight.ours.removeprefix("blocks.").partition(".")
        names = [re.sub(r"^lm_head\.", head, re.sub(r"^model\.", decoder, name)) for name in weight.names]
        ours = f"blocks.{int(block) + run + 2}.{rest}"
        pairs.append(replace(weight, ours=ours, theirs=tuple(names) if len(names) > 1 else names[0]))
    return pairs


def _place(weight: Weight, run: int) -> Weight:
    """The weight of a tower under its name here: the last blocks stand inside the block of the unused."""
    block, _, rest = weight.ours.removeprefix("blocks.").partition(".")
    number = int(block)
    return weight if number < run else replace(weight, ours=f"blocks.{run}.parts.{number - run}.{rest}")


def to_fields(config: VisionLanguageConfig) -> dict[str, Any]:
    """The fields of a LlavaConfig."""
    return _FIXED | {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": config.image_token_id,
        "image_seq_length": config.image_tokens,
        "vision_feature_layer": config.feature_layer,
        "vision_feature_select_strategy": "full" if config.keep_class_token else "default",
        "tie_word_embeddings": config.text.tie_embeddings,
        "vision_config": vision_to_fields(config.vision),
        "text_config": llama_hf.LLAMA.to_fields(config.text),
    }


def from_fields(fields: dict[str, Any]) -> VisionLanguageConfig:
    """Our config from a LlavaConfig's fields. Raises ValueError for settings that we do not compute."""
    refuse_other_than(_FIXED, fields)
    vision = {"image_size": 336, "patch_size": 14, "num_hidden_layers": 24, "hidden_size": 1024}
    vision |= {"num_attention_heads": 16, "intermediate_size": 4096} | (fields.get("vision_config") or {})
    text = fields.get("text_config") or {}
    for part, wanted in ((vision, "clip_vision_model"), (text, "llama")):
        refuse_other_than({"model_type": wanted}, part)
    layer = fields.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise ValueError(f"config.json sets vision_feature_layer={layer!r}; one layer is supported")
    config = vision_from_fields(vision)
    return VisionLanguageConfig(
        vision=config,
        text=llama_hf.LLAMA.from_fields(text),
        image_token_id=fields.get("image_token_index", 32000),
        feature_layer=layer if layer < 0 else layer - config.num_layers - 1,
        keep_class_token=fields.get("vision_feature_select_strategy", "default") == "full",
    )


def rename(config: VisionLanguageConfig, name: str) -> str:
    """The released files' name for one that transformers 5 uses, in memory or in its own files."""
    name = re.sub(r"^model\.(?=vision_tower\.|multi_modal_projector\.)", "", name)
    name = re.sub(r"^model\.language_model\.", DECODER, name)
    name = re.sub(r"^lm_head\.", HEAD, name)
    return re.sub(r"^vision_tower\.(?!vision_model\.)", TOWER, name)


def ignore(config: VisionLanguageConfig, name: str) -> bool:
    old = name.endswith(("embeddings.position_ids", "rotary_emb.inv_freq"))
    return old or (config.text.tie_embeddings and name == f"{HEAD}weight")


FORMAT = HFFormat("model_type", "llava", weights, to_fields, from_fields, rename, ignore)
