"""The shapes of the model families of fmlab.models, read from their configs."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal

from torch import nn

from fmlab.models import (
    BERTConfig,
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    DiTConfig,
    GPTConfig,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    UNetConfig,
)
from fmlab.models.base import Model
from fmlab.models.diffusion.dit import WAVES
from fmlab.models.diffusion.unet_layout import Part as UNetPart
from fmlab.models.diffusion.unet_layout import layout
from fmlab.models.distilbert import DistilBERTConfig
from fmlab.models.families import FAMILIES, family_of
from fmlab.models.roberta import RoBERTaConfig
from fmlab.planner.parts import Convolution, Embedding, Head, LayerGroup, Part, Residual
from fmlab.planner.shapes import ModelShape, Stream, bert_shape, gpt_shape, llama_shape, t5_shape

TEXT = 77  # tokens of a prompt, as Stable Diffusion gives them to its UNet


def shape_of(model: Any, changes: Mapping[str, Any]) -> ModelShape:
    """See fmlab.planner.shapes.model_shape."""
    if isinstance(model, str) and not changes:
        return _preset(model)
    if isinstance(model, str):
        return _from_config(_config(family_of(model, FAMILIES), model, changes), model)
    if isinstance(model, nn.Module):
        return _of_module(model, changes)
    if is_dataclass(model) and not isinstance(model, type):
        return _from_config(_replaced(model, changes), type(model).__name__)
    raise ValueError(
        f"a model is the name of a preset, a config, a model or a ModelShape, not {type(model).__name__}; "
        "for sizes of your own use gpt_shape, llama_shape, bert_shape or t5_shape of fmlab.planner"
    )


@cache
def _preset(name: str) -> ModelShape:
    """The same shape each time, so that what was worked out of it is not worked out again."""
    return _from_config(_config(family_of(name, FAMILIES), name, {}), name)


def _config(family: type[Model], preset: str, changes: Mapping[str, Any]) -> Any:
    family._check_fields(dict(changes))
    return family.CONFIG(**{**family.PRESETS[preset], **changes})


def _replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    if unknown := sorted(set(changes) - set(values)):
        raise ValueError(f"a {type(config).__name__} has no {', '.join(unknown)}; it has {', '.join(values)}")
    return type(config)(**{**values, **changes}) if changes else config


def _of_module(model: nn.Module, changes: Mapping[str, Any]) -> ModelShape:
    if changes:
        raise ValueError("a model is built; give its config, or a preset's name, with the fields to replace")
    name = type(model).__name__
    shape = _from_config(getattr(model, "config", None), name)
    if (counted := sum(p.numel() for p in model.parameters())) != shape.parameters:
        raise ValueError(
            f"this {name} has {counted:,} parameters, and a model of its config {shape.parameters:,}: "
            "something was added to it or taken away, which a plan would not see; plan it as it was built"
        )
    return shape


def _from_config(config: Any, name: str) -> ModelShape:
    """By the config's own class, or the nearest class that it derives from."""
    for kind in type(config).__mro__:
        if kind in _SHAPES:
            return _SHAPES[kind](config, name)
    legal = ", ".join(kind.__name__.removesuffix("Config") for kind in _SHAPES)
    what = name if config is None else type(config).__name__.removesuffix("Config")
    raise ValueError(f"the planner has no formulas for {what}; it has them for {legal}")


# ---- text --------------------------------------------------------------------------------------------------


def _gpt(config: GPTConfig, name: str) -> ModelShape:
    return gpt_shape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        vocab=config.vocab_size,
        ffn=config.ffn_size,
        positions=config.max_positions,
        tied=config.tie_embeddings,
        name=name,
    )


def _llama(config: LlamaConfig, name: str) -> ModelShape:
    mixture = {}
    if isinstance(config, MixtralConfig):
        mixture = dict(experts=config.num_experts, experts_per_token=config.experts_per_token)
    shape = llama_shape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        ffn=config.ffn_size,
        vocab=config.vocab_size,
        tied=config.tie_embeddings,
        bias="qkv" if config.qkv_bias else False,
        name=name,
        family="Mixtral" if mixture else "Llama",
        **mixture,
    )
    return ModelShape(shape.name, shape.family, shape.parts, shape.streams, config.max_positions)


def _bert(config: BERTConfig, name: str) -> ModelShape:
    return bert_shape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        vocab=config.vocab_size,
        ffn=config.ffn_size,
        positions=config.max_positions,
        token_types=config.token_types,
        head=config.heads,
        classes=config.num_classes,
        longest=config.max_length,
        name=name,
        family={RoBERTaConfig: "RoBERTa", DistilBERTConfig: "DistilBERT"}.get(type(config), "BERT"),
    )


def _t5(config: T5Config, name: str) -> ModelShape:
    return t5_shape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        head_width=config.head_size,
        ffn=config.ffn_size,
        vocab=config.vocab_size,
        decoder_layers=config.decoder_layers,
        gated=config.gated,
        tied=config.tie_embeddings,
        buckets=config.num_buckets,
        name=name,
    )


# ---- pictures ----------------------------------------------------------------------------------------------


def _tower(config: CLIPTextConfig | CLIPVisionConfig, stream: str) -> tuple[Part, ...]:
    width, heads = config.hidden_size, config.num_heads
    kind: Literal["decoder", "encoder"] = "decoder" if isinstance(config, CLIPTextConfig) else "encoder"
    ffn = config.ffn_size or 4 * width
    layers = LayerGroup(config.num_layers, kind, width, heads, heads, width // heads, ffn, stream=stream)
    if isinstance(config, CLIPTextConfig):
        table = Embedding(stream, width, tokens=config.vocab_size, positions=config.max_positions)
        return (table, layers, Head(stream, width, norm="layer"))
    patch = config.channels * config.patch_size**2
    places = config.patches + 1
    table = Embedding(stream, width, positions=places, patch=patch, norm="layer", class_token=True)
    return (table, layers, Head(stream, width, norm="layer", per_row=True))


def _clip_text(config: CLIPTextConfig, name: str) -> ModelShape:
    text = Stream("text", config.max_positions)
    return ModelShape(name, "CLIPText", _tower(config, "text"), (text,), config.max_positions)


def _clip_vision(config: CLIPVisionConfig, name: str) -> ModelShape:
    image = Stream("image", config.patches + 1, fixed=True)
    return ModelShape(name, "CLIPVision", _tower(config, "image"), (image,))


def _clip(config: CLIPConfig, name: str) -> ModelShape:
    size = config.projection_size
    ends = (
        Head("image", config.vision.hidden_size, dense=config.vision.hidden_size * size, per_row=True),
        Head("text", config.text.hidden_size, dense=config.text.hidden_size * size, per_row=True, others=1),
    )  # others: the scale
    image = Stream("image", config.vision.patches + 1, fixed=True)
    text = Stream("text", config.text.max_positions)
    parts = (*_tower(config.vision, "image"), *_tower(config.text, "text"), *ends)
    return ModelShape(name, "CLIP", parts, (image, text), config.text.max_positions)


def _pixels(level: int) -> str:
    return f"pixels/{2**level}"


def _unet(config: UNetConfig, name: str) -> ModelShape:
    first, time = config.channels[0], config.time_size
    parts: list[Part] = [
        Convolution(
            _pixels(0),
            config.in_channels,
            first,
            others=2 * time,
            row_matrices=first * time + time * time,
            leaves=True,
        )
    ]
    for part in layout(config):
        before = parts[-1].width
        parts += _unet_block(config, part, part.inputs - before if part.kind == "up" else 0)
    parts.append(Convolution(_pixels(0), first, config.out_channels, others=2 * first))
    sides = [-(-config.sample_size // 2**level) for level in range(len(config.channels))]
    streams = [Stream(_pixels(level), side * side, fixed=True) for level, side in enumerate(sides)]
    return ModelShape(name, "UNet", tuple(parts), (*streams, Stream("text", TEXT)))


def _unet_block(config: UNetConfig, part: UNetPart, takes: int) -> list[Part]:
    width = part.outputs
    if part.kind == "downsample":
        return [Convolution(_pixels(part.level + 1), width, width, stride=2, leaves=True)]
    if part.kind == "upsample":
        return [Convolution(_pixels(part.level - 1), width, width)]
    stream, time = _pixels(part.level), config.time_size
    leaves = part.kind == "down"
    found: list[Part] = [Residual(stream, part.inputs, width, time, leaves=leaves, takes=takes)]
    if part.heads:
        found.append(
            LayerGroup(
                1,
                "encoder",
                width,
                part.heads,
                part.heads,
                width // part.heads,
                4 * width,
                gated=True,
                activation_kept=False,
                stream=stream,
                cross_width=config.text_size,
                cross_stream="text",
                qkv_bias=False,
                other_matrices=2 * width * width,  # in front of the layer and behind it
                others=2 * width + 2 * width,  # their biases, a group norm
                starts=False,
            )
        )
    if part.kind == "middle":
        found.append(Residual(stream, width, width, time, starts=False))
    return found


def _dit(config: DiTConfig, name: str) -> ModelShape:
    width, side = config.hidden_size, config.sample_size // config.patch_size
    classes = 0 if config.num_classes is None else (config.num_classes + 1) * width
    condition: dict[str, Any] = dict(row_matrices=WAVES * width + width * width, others=2 * width + classes)
    own: dict[str, Any]
    first: dict[str, Any]
    own, first = (condition, {}) if config.embedder_per_layer else ({}, condition)
    layers = LayerGroup(
        config.num_layers,
        "encoder",
        width,
        config.num_heads,
        config.num_heads,
        config.head_size,
        4 * width,
        stream="patches",
        cross_width=config.text_size or 0,
        cross_stream="text" if config.text_size else "",
        norms=1 if config.text_size else 0,
        row_matrices=6 * width * width + own.get("row_matrices", 0),
        others=6 * width + own.get("others", 0),
    )
    pixels = config.patch_size**2 * config.out_channels
    parts = (
        Convolution("patches", config.in_channels, width, config.patch_size, config.patch_size, **first),
        layers,
        Head(
            "patches", width, dense=pixels * width, others=pixels + 2 * width, row_matrices=2 * width * width
        ),
    )
    text = (Stream("text", TEXT),) if config.text_size else ()
    return ModelShape(name, "DiT", parts, (Stream("patches", side * side, fixed=True), *text))


_SHAPES: dict[type, Callable[[Any, str], ModelShape]] = {
    GPTConfig: _gpt,
    LlamaConfig: _llama,
    BERTConfig: _bert,
    T5Config: _t5,
    CLIPConfig: _clip,
    CLIPTextConfig: _clip_text,
    CLIPVisionConfig: _clip_vision,
    UNetConfig: _unet,
    DiTConfig: _dit,
}
