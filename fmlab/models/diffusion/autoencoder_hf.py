"""AutoencoderKL in diffusers' format: names, layouts and config fields (diffusers' AutoencoderKL)."""

from typing import TYPE_CHECKING, Any

from fmlab.models.diffusion.unet_hf import both, resnet_weights
from fmlab.models.hf import HFFormat, Weight, refuse_other_than

if TYPE_CHECKING:
    from fmlab.models.diffusion.autoencoder import AutoencoderConfig, Part

# Settings of an AutoencoderKL that change the mathematics, with the only values we compute. `force_upcast`
# does not: it tells a pipeline to leave half precision.
_FIXED: dict[str, Any] = {
    "act_fn": "silu",
    "shift_factor": None,
    "latents_mean": None,
    "latents_std": None,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
}
# Old checkpoints' names of the matrices of the attention in the middle.
_OLD = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def weights(config: "AutoencoderConfig") -> list[Weight]:
    """Our names beside theirs."""
    from fmlab.models.diffusion.autoencoder import layout

    pairs, at = both("blocks.0.conv", "encoder.conv_in"), 1
    for part in layout(config, "encoder"):
        pairs += _part_weights(config, part, f"blocks.{at}")
        at += 1
    pairs += both(f"blocks.{at}.norm", "encoder.conv_norm_out") + both(
        f"blocks.{at}.conv", "encoder.conv_out"
    )
    pairs += both(f"blocks.{at}.quantize", "quant_conv")
    pairs += both(f"blocks.{at + 1}.unquantize", "post_quant_conv")
    pairs += both(f"blocks.{at + 1}.conv", "decoder.conv_in")
    at += 2
    for part in layout(config, "decoder"):
        pairs += _part_weights(config, part, f"blocks.{at}")
        at += 1
    return (
        pairs
        + both(f"blocks.{at}.norm", "decoder.conv_norm_out")
        + both(f"blocks.{at}.conv", "decoder.conv_out")
    )


def _part_weights(config: "AutoencoderConfig", part: "Part", ours: str) -> list[Weight]:
    if part.side == "encoder":
        level, resample = f"encoder.down_blocks.{part.level}", "downsamplers"
    else:
        level, resample = f"decoder.up_blocks.{len(config.channels) - 1 - part.level}", "upsamplers"
    if part.kind in ("downsample", "upsample"):
        return both(f"{ours}.steps.0.conv", f"{level}.{resample}.0.conv")
    if part.kind == "layer":
        theirs, shortcut = f"{level}.resnets.{part.index}", part.inputs != part.outputs
        return resnet_weights(f"{ours}.steps.0", theirs, time=False, shortcut=shortcut)
    middle = f"{part.side}.mid_block"
    pairs = resnet_weights(f"{ours}.steps.0", f"{middle}.resnets.0", time=False, shortcut=False)
    attention, theirs = f"{ours}.steps.1.attention", f"{middle}.attentions.0"
    pairs += both(f"{ours}.steps.1.norm", f"{theirs}.group_norm")
    for kind in ("weight", "bias"):
        pairs.append(Weight(f"{attention}.qkv.{kind}", tuple(f"{theirs}.to_{x}.{kind}" for x in "qkv")))
    pairs += both(f"{attention}.output", f"{theirs}.to_out.0")
    return pairs + resnet_weights(f"{ours}.steps.2", f"{middle}.resnets.1", time=False, shortcut=False)


def to_hf_config(config: "AutoencoderConfig") -> dict[str, Any]:
    """The fields of an AutoencoderKL's config."""
    levels = len(config.channels)
    return _FIXED | {
        "_class_name": "AutoencoderKL",
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "block_out_channels": list(config.channels),
        "layers_per_block": config.layers_per_level,
        "latent_channels": config.latent_channels,
        "norm_num_groups": config.norm_groups,
        "sample_size": config.sample_size,
        "scaling_factor": config.scaling_factor,
        "force_upcast": True,
    }


def from_hf_config(fields: dict[str, Any]) -> "AutoencoderConfig":
    """Our config from an AutoencoderKL's. Raises ValueError for settings that we do not compute."""
    from fmlab.models.diffusion.autoencoder import AutoencoderConfig

    refuse_other_than(_FIXED, fields)
    down = set(fields.get("down_block_types", ["DownEncoderBlock2D"]))
    up = set(fields.get("up_block_types", ["UpDecoderBlock2D"]))
    if down != {"DownEncoderBlock2D"} or up != {"UpDecoderBlock2D"}:
        raise ValueError(
            f"config.json has the blocks {sorted(down | up)}; only DownEncoderBlock2D and UpDecoderBlock2D "
            "are supported"
        )
    return AutoencoderConfig(
        channels=tuple(fields.get("block_out_channels", (64,))),
        layers_per_level=fields.get("layers_per_block", 1),
        latent_channels=fields.get("latent_channels", 4),
        in_channels=fields.get("in_channels", 3),
        out_channels=fields.get("out_channels", 3),
        norm_groups=fields.get("norm_num_groups", 32),
        scaling_factor=fields.get("scaling_factor", 0.18215),  # the first checkpoints' files lack it
        sample_size=fields.get("sample_size", 32),
    )


def _rename(config: "AutoencoderConfig", name: str) -> str:
    """Checkpoints of before 2023 (Stable Diffusion 1.5's among them) name the attention differently."""
    stem, _, kind = name.rpartition(".")
    front, _, last = stem.rpartition(".")
    return f"{front}.{_OLD[last]}.{kind}" if ".attentions." in name and last in _OLD else name


FORMAT = HFFormat(
    "_class_name",
    "AutoencoderKL",
    weights,
    to_hf_config,
    from_hf_config,
    _rename,
    stem="diffusion_pytorch_model",
)
