"""CLIP in Hugging Face's format: transformers' CLIPModel, CLIPTextModel and CLIPVisionModel."""

from typing import Any

from fmlab.models.clip import INITIAL_SCALE, CLIPConfig
from fmlab.models.clip_config import ACTIVATIONS, CLIPTextConfig, CLIPVisionConfig
from fmlab.models.hf import HFFormat, Weight, refuse_other_than

# Settings that change the mathematics, with the only values we compute.
_FIXED = {"attention_dropout": 0.0}
_KINDS = ("weight", "bias")


def _layers(start: int, layers: int, prefix: str) -> list[Weight]:
    pairs = []
    for i in range(layers):
        ours, theirs = f"blocks.{start + 1 + i}", f"{prefix}encoder.layers.{i}"
        for kind in _KINDS:
            qkv = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
            pairs += [
                Weight(f"{ours}.attention_norm.{kind}", f"{theirs}.layer_norm1.{kind}"),
                Weight(f"{ours}.attention.qkv.{kind}", qkv),
                Weight(f"{ours}.attention.output.{kind}", f"{theirs}.self_attn.out_proj.{kind}"),
                Weight(f"{ours}.mlp_norm.{kind}", f"{theirs}.layer_norm2.{kind}"),
                Weight(f"{ours}.mlp.up.{kind}", f"{theirs}.mlp.fc1.{kind}"),
                Weight(f"{ours}.mlp.down.{kind}", f"{theirs}.mlp.fc2.{kind}"),
            ]
    return pairs


def text_weights(config: CLIPTextConfig, start: int = 0, prefix: str = "") -> list[Weight]:
    """Our names beside theirs for a text tower whose first block is number `start`."""
    last = start + config.num_layers + 1
    return [
        Weight(f"blocks.{start}.tokens.weight", f"{prefix}embeddings.token_embedding.weight"),
        Weight(f"blocks.{start}.positions.weight", f"{prefix}embeddings.position_embedding.weight"),
        *_layers(start, config.num_layers, prefix),
        *(Weight(f"blocks.{last}.norm.{kind}", f"{prefix}final_layer_norm.{kind}") for kind in _KINDS),
    ]


def vision_weights(config: CLIPVisionConfig, start: int = 0, prefix: str = "") -> list[Weight]:
    """The same for an image tower. `pre_layrnorm` is spelled so in the files."""
    last = start + config.num_layers + 1
    return [
        Weight(f"blocks.{start}.patches", f"{prefix}embeddings.patch_embedding.weight"),
        Weight(f"blocks.{start}.class_token", f"{prefix}embeddings.class_embedding"),
        Weight(f"blocks.{start}.positions.weight", f"{prefix}embeddings.position_embedding.weight"),
        *(Weight(f"blocks.{start}.norm.{kind}", f"{prefix}pre_layrnorm.{kind}") for kind in _KINDS),
        *_layers(start, config.num_layers, prefix),
        *(Weight(f"blocks.{last}.norm.{kind}", f"{prefix}post_layernorm.{kind}") for kind in _KINDS),
    ]


def text_to_fields(config: CLIPTextConfig, projection: int = 512) -> dict[str, Any]:
    """The fields of a CLIPTextConfig. Only CLIP's own vocabulary fixes the start and padding tokens."""
    published = config.vocab_size == 49408
    return _FIXED | {
        "architectures": ["CLIPTextModel"],
        "model_type": "clip_text_model",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
        "projection_dim": projection,
        "bos_token_id": 49406 if published else None,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": 1 if published else None,
    }


def text_from_fields(fields: dict[str, Any]) -> CLIPTextConfig:
    """Our config from a CLIPTextConfig's fields. Raises ValueError for settings that we do not compute."""
    refuse_other_than(_FIXED, fields)
    return CLIPTextConfig(
        vocab_size=fields.get("vocab_size", 49408),
        max_positions=fields.get("max_position_embeddings", 77),
        num_layers=fields.get("num_hidden_layers", 12),
        hidden_size=fields.get("hidden_size", 512),
        num_heads=fields.get("num_attention_heads", 8),
        ffn_size=fields.get("intermediate_size", 2048),
        activation=_activation(fields),
        eos_token_id=fields.get("eos_token_id", 49407),
        norm_eps=fields.get("layer_norm_eps", 1e-5),
    )


def vision_to_fields(config: CLIPVisionConfig, projection: int = 512) -> dict[str, Any]:
    """The fields of a CLIPVisionConfig."""
    return _FIXED | {
        "architectures": ["CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
        "projection_dim": projection,
    }


def vision_from_fields(fields: dict[str, Any]) -> CLIPVisionConfig:
    """Our config from a CLIPVisionConfig's fields. Raises ValueError for settings that we do not compute."""
    refuse_other_than(_FIXED, fields)
    return CLIPVisionConfig(
        image_size=fields.get("image_size", 224),
        patch_size=fields.get("patch_size", 32),
        channels=fields.get("num_channels", 3),
        num_layers=fields.get("num_hidden_layers", 12),
        hidden_size=fields.get("hidden_size", 768),
        num_heads=fields.get("num_attention_heads", 12),
        ffn_size=fields.get("intermediate_size", 3072),
        activation=_activation(fields),
        norm_eps=fields.get("layer_norm_eps", 1e-5),
    )


def weights(config: CLIPConfig) -> list[Weight]:
    """Our names beside theirs for a whole CLIP."""
    text_start = config.vision.num_layers + 2
    head = f"blocks.{text_start + config.text.num_layers + 2}"
    return [
        *vision_weights(config.vision, 0, "vision_model."),
        *text_weights(config.text, text_start, "text_model."),
        Weight(f"{head}.image_projection.weight", "visual_projection.weight"),
        Weight(f"{head}.text_projection.weight", "text_projection.weight"),
        Weight(f"{head}.log_scale", "logit_scale"),
    ]


def to_fields(config: CLIPConfig) -> dict[str, Any]:
    """The fields of a CLIPConfig of transformers."""
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.projection_size,
        "logit_scale_init_value": INITIAL_SCALE,
        "text_config": text_to_fields(config.text, config.projection_size),
        "vision_config": vision_to_fields(config.vision, config.projection_size),
    }


def from_fields(fields: dict[str, Any]) -> CLIPConfig:
    """Our config from theirs. In old files the shapes stand in `text_config_dict`, which then counts."""

    def of(tower: str) -> dict[str, Any]:
        return {**(fields.get(tower) or {}), **(fields.get(f"{tower}_dict") or {})}

    return CLIPConfig(
        text=text_from_fields(of("text_config")),
        vision=vision_from_fields(of("vision_config")),
        projection_size=fields.get("projection_dim", 512),
    )


def _activation(fields: dict[str, Any]) -> str:
    name = str(fields.get("hidden_act", "quick_gelu"))
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json sets hidden_act={name!r}; supported are {', '.join(ACTIVATIONS)}")
    return name


def _prefixed(prefix: str, name: str) -> str:
    """Released files name a tower's weights as inside the whole CLIP; newer ones leave that prefix out."""
    return name if name.startswith(prefix) else prefix + name


def _old_positions(config: Any, name: str) -> bool:
    """Old files hold the row of numbers 0, 1, 2, ... as a buffer."""
    return name.endswith("embeddings.position_ids")


TEXT_FORMAT = HFFormat(
    "model_type",
    "clip_text_model",
    lambda config: text_weights(config, prefix="text_model."),
    text_to_fields,
    text_from_fields,
    lambda config, name: _prefixed("text_model.", name),
    _old_positions,
)
VISION_FORMAT = HFFormat(
    "model_type",
    "clip_vision_model",
    lambda config: vision_weights(config, prefix="vision_model."),
    vision_to_fields,
    vision_from_fields,
    lambda config, name: _prefixed("vision_model.", name),
    _old_positions,
)
FORMAT = HFFormat("model_type", "clip", weights, to_fields, from_fields, ignore=_old_positions)
