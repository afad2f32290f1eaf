"""UNet in diffusers' format: names, layouts and config fields (diffusers' UNet2DConditionModel)."""

from typing import TYPE_CHECKING, Any

from fmlab.models.hf import HFFormat, Weight, refuse_other_than

if TYPE_CHECKING:
    from fmlab.models.diffusion.unet_layout import Part, UNetConfig

# Settings of a UNet2DConditionModel that change the mathematics, with the only values we compute.
_FIXED: dict[str, Any] = {
    "act_fn": "silu",
    "center_input_sample": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "downsample_padding": 1,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "transformer_layers_per_block": 1,
    "only_cross_attention": False,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "class_embed_type": None,
    "num_class_embeds": None,
    "addition_embed_type": None,
    "resnet_time_scale_shift": "default",
    "resnet_skip_time_act": False,
    "resnet_out_scale_factor": 1.0,
    "time_embedding_type": "positional",
    "time_embedding_dim": None,
    "time_embedding_act_fn": None,
    "timestep_post_act": None,
    "time_cond_proj_dim": None,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "attention_type": "default",
    "cross_attention_norm": None,
    "num_attention_heads": None,
}


def both(ours: str, theirs: str) -> list[Weight]:
    """A weight and its bias."""
    return [Weight(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


def resnet_weights(ours: str, theirs: str, time: bool, shortcut: bool) -> list[Weight]:
    """Those of a ResNetBlock beside those of a ResnetBlock2D."""
    pairs = [
        pair
        for name in ("norm1", "conv1", "norm2", "conv2")
        for pair in both(f"{ours}.{name}", f"{theirs}.{name}")
    ]
    pairs += both(f"{ours}.time", f"{theirs}.time_emb_proj") if time else []
    return pairs + (both(f"{ours}.shortcut", f"{theirs}.conv_shortcut") if shortcut else [])


def transformer_weights(ours: str, theirs: str) -> list[Weight]:
    """Those of a SpatialTransformer beside those of a Transformer2DModel."""
    layer, block = f"{ours}.layers.0", f"{theirs}.transformer_blocks.0"
    first, second = f"{block}.attn1", f"{block}.attn2"
    return [
        *both(f"{ours}.norm", f"{theirs}.norm"),
        *both(f"{ours}.enter", f"{theirs}.proj_in"),
        *both(f"{layer}.attention_norm", f"{block}.norm1"),
        Weight(f"{layer}.attention.qkv.weight", tuple(f"{first}.to_{x}.weight" for x in "qkv")),
        *both(f"{layer}.attention.output", f"{first}.to_out.0"),
        *both(f"{layer}.cross_norm", f"{block}.norm2"),
        Weight(f"{layer}.cross.query.weight", f"{second}.to_q.weight"),
        Weight(f"{layer}.cross.key_value.weight", tuple(f"{second}.to_{x}.weight" for x in "kv")),
        *both(f"{layer}.cross.output", f"{second}.to_out.0"),
        *both(f"{layer}.mlp_norm", f"{block}.norm3"),
        *both(f"{layer}.mlp.up", f"{block}.ff.net.0.proj"),
        *both(f"{layer}.mlp.down", f"{block}.ff.net.2"),
        *both(f"{ours}.leave", f"{theirs}.proj_out"),
    ]


def weights(config: "UNetConfig") -> list[Weight]:
    """Our names beside theirs."""
    from fmlab.models.diffusion.unet_layout import layout

    pairs = both("blocks.0.conv", "conv_in")
    pairs += both("blocks.0.time.up", "time_embedding.linear_1")
    pairs += both("blocks.0.time.down", "time_embedding.linear_2")
    parts = list(layout(config))
    for number, part in enumerate(parts, start=1):
        pairs += _part_weights(config, part, f"blocks.{number}")
    last = f"blocks.{len(parts) + 1}"
    return pairs + both(f"{last}.norm", "conv_norm_out") + both(f"{last}.conv", "conv_out")


def _part_weights(config: "UNetConfig", part: "Part", ours: str) -> list[Weight]:
    down, up = f"down_blocks.{part.level}", f"up_blocks.{len(config.channels) - 1 - part.level}"
    if part.kind == "downsample":
        return both(f"{ours}.resample.conv", f"{down}.downsamplers.0.conv")
    if part.kind == "upsample":
        return both(f"{ours}.resample.conv", f"{up}.upsamplers.0.conv")
    theirs = {"down": down, "up": up, "middle": "mid_block"}[part.kind]
    index, shortcut = part.index, part.inputs != part.outputs
    pairs = resnet_weights(f"{ours}.resnet", f"{theirs}.resnets.{index}", time=True, shortcut=shortcut)
    if part.heads:
        pairs += transformer_weights(f"{ours}.transformer", f"{theirs}.attentions.{index}")
    if part.kind == "middle":
        pairs += resnet_weights(f"{ours}.resnet2", f"{theirs}.resnets.1", time=True, shortcut=False)
    return pairs


def to_hf_config(config: "UNetConfig") -> dict[str, Any]:
    """The fields of a UNet2DConditionModel's config."""
    assert config.attention is not None
    down = ["CrossAttnDownBlock2D" if used else "DownBlock2D" for used in config.attention]
    up = ["CrossAttnUpBlock2D" if used else "UpBlock2D" for used in reversed(config.attention)]
    same_heads = len(set(config.heads)) == 1
    return _FIXED | {
        "_class_name": "UNet2DConditionModel",
        "sample_size": config.sample_size,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "down_block_types": down,
        "up_block_types": up,
        "block_out_channels": list(config.channels),
        "layers_per_block": config.layers_per_level,
        "dropout": config.dropout,
        "norm_num_groups": config.norm_groups,
        "norm_eps": config.norm_eps,
        "cross_attention_dim": config.text_size,
        # Their name says width, their code reads it as the number of heads: see from_hf_config.
        "attention_head_dim": config.heads[0] if same_heads else list(config.heads),
        "use_linear_projection": config.linear_projection,
    }


def from_hf_config(fields: dict[str, Any]) -> "UNetConfig":
    """Our config from a UNet2DConditionModel's. Raises ValueError for settings that we do not compute.

    `attention_head_dim` is the NUMBER of heads there, whatever it is called: a misnomer that diffusers keeps
    for the sake of its old checkpoints (8 in 1.5 means 8 heads, of 40, 80 and 160). `upcast_attention` (true
    in 2.1) is accepted and has no effect, as with diffusers' own fused attention.
    """
    from fmlab.models.diffusion.unet_layout import UNetConfig

    refuse_other_than(_FIXED, fields)
    channels = tuple(fields.get("block_out_channels", (320, 640, 1280, 1280)))
    down = fields.get("down_block_types", ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"])
    up = fields.get("up_block_types", ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3)
    attention = tuple(kind == "CrossAttnDownBlock2D" for kind in down)
    mirrored = ["CrossAttnUpBlock2D" if used else "UpBlock2D" for used in reversed(attention)]
    if set(down) - {"CrossAttnDownBlock2D", "DownBlock2D"} or list(up) != mirrored:
        raise ValueError(
            f"config.json has the blocks {list(down)} and {list(up)}; only (CrossAttn)DownBlock2D and the "
            "same upwards are supported"
        )
    heads = fields.get("attention_head_dim", 8)
    return UNetConfig(
        channels=channels,
        heads=(heads,) * len(channels) if isinstance(heads, int) else tuple(heads),
        text_size=_one_value(fields, "cross_attention_dim", 1280),
        attention=attention,
        layers_per_level=_one_value(fields, "layers_per_block", 2),
        linear_projection=fields.get("use_linear_projection", False),
        in_channels=fields.get("in_channels", 4),
        out_channels=fields.get("out_channels", 4),
        norm_groups=fields.get("norm_num_groups", 32),
        norm_eps=fields.get("norm_eps", 1e-5),
        dropout=fields.get("dropout", 0.0),
        sample_size=_one_value(fields, "sample_size", None) or 64,
    )


def _one_value(fields: dict[str, Any], name: str, default: Any) -> Any:
    """A field that may be a list with an entry for each level (or side), if all are the same."""
    value = fields.get(name, default)
    if not isinstance(value, list | tuple):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"config.json sets {name}={value!r}; only one value for all is supported")
    return value[0]


FORMAT = HFFormat(
    "_class_name",
    "UNet2DConditionModel",
    weights,
    to_hf_config,
    from_hf_config,
    stem="diffusion_pytorch_model",
)
