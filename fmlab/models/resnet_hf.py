"""ResNet in Hugging Face's format (transformers' ResNetForImageClassification)."""

from typing import Any

from fmlab.models.hf import HFFormat, Weight, refuse_other_than
from fmlab.models.resnet import LAYERS, ResNetConfig

_FIXED = {"hidden_act": "relu", "downsample_in_first_stage": False, "downsample_in_bottleneck": False}


def _conv(ours: str, theirs: str) -> list[Weight]:
    """A convolution with its norm; the running statistics are no parameters but belong to the model."""
    leaves = ("weight", "bias", "running_mean", "running_var")
    norm = [Weight(f"{ours}.norm.{leaf}", f"{theirs}.normalization.{leaf}") for leaf in leaves]
    return [Weight(f"{ours}.weight", f"{theirs}.convolution.weight"), *norm]


def weights(config: ResNetConfig) -> list[Weight]:
    """Our names beside theirs."""
    pairs = _conv("blocks.0.conv", "resnet.embedder.embedder")
    block, channels = 0, config.stem_width
    for stage, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
        for index in range(depth):
            block += 1
            theirs = f"resnet.encoder.stages.{stage}.layers.{index}"
            if channels != width or (stage > 0 and index == 0):
                pairs += _conv(f"blocks.{block}.project", f"{theirs}.shortcut")
            for i in range(2 if config.layer == "basic" else 3):
                pairs += _conv(f"blocks.{block}.convs.{i}", f"{theirs}.layer.{i}")
            channels = width
    return pairs + [
        Weight(f"blocks.{block + 1}.classifier.{leaf}", f"classifier.1.{leaf}") for leaf in ("weight", "bias")
    ]


def to_hf_config(config: ResNetConfig) -> dict[str, Any]:
    """The fields of a transformers ResNetConfig. Raises ValueError for group norm, which it does not have."""
    if config.norm != "batch" or config.norm_eps != 1e-5 or config.momentum != 0.1:
        raise ValueError("transformers' ResNet has batch norm with eps 1e-5 and momentum 0.1 only")
    return _FIXED | {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "num_channels": config.image_channels,
        "embedding_size": config.stem_width,
        "hidden_sizes": list(config.widths),
        "depths": list(config.depths),
        "layer_type": config.layer,
        "id2label": {str(i): f"LABEL_{i}" for i in range(config.num_labels)},
        "label2id": {f"LABEL_{i}": i for i in range(config.num_labels)},
    }


def from_hf_config(fields: dict[str, Any]) -> ResNetConfig:
    """Our config from theirs. Raises ValueError for settings that we do not compute."""
    refuse_other_than(_FIXED, fields)
    return ResNetConfig(
        widths=tuple(fields.get("hidden_sizes", (256, 512, 1024, 2048))),
        depths=tuple(fields.get("depths", (3, 4, 6, 3))),
        layer=fields.get("layer_type", next(reversed(LAYERS))),
        num_labels=len(fields.get("id2label", "ab")),  # transformers leaves out the two default labels
        stem_width=fields.get("embedding_size", 64),
        image_channels=fields.get("num_channels", 3),
    )


def _ignore(config: ResNetConfig, name: str) -> bool:
    return name.endswith("num_batches_tracked")  # a counter that nothing depends on


FORMAT = HFFormat("model_type", "resnet", weights, to_hf_config, from_hf_config, ignore=_ignore)
