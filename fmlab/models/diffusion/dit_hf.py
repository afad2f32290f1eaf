"""DiT in diffusers' format: names, layouts and config fields (diffusers' DiTTransformer2DModel)."""

from typing import TYPE_CHECKING, Any

from fmlab.models.diffusion.unet_hf import both
from fmlab.models.hf import HFFormat, Weight, refuse_other_than

if TYPE_CHECKING:
    from fmlab.models.diffusion.dit import DiTConfig

# Settings of a DiTTransformer2DModel that change the mathematics, with the only values we compute.
_FIXED: dict[str, Any] = {
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "dropout": 0.0,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
    "upcast_attention": False,
}
FREQUENCY_SHIFT = 1.0  # what diffusers computes with; the paper's code has 0


def weights(config: "DiTConfig") -> list[Weight]:
    """Our names beside theirs. They keep an embedder in every layer; a shared one is written that often."""
    pairs = both("blocks.0.patch", "pos_embed.proj")
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i + 1}", f"transformer_blocks.{i}"
        owner = ours if config.embedder_per_layer else "blocks.0"
        condition, embedder = f"{owner}.condition", f"{theirs}.norm1.emb"
        pairs += both(f"{condition}.time.up", f"{embedder}.timestep_embedder.linear_1")
        pairs += both(f"{condition}.time.down", f"{embedder}.timestep_embedder.linear_2")
        pairs.append(
            Weight(f"{condition}.classes.weight", f"{embedder}.class_embedder.embedding_table.weight")
        )
        pairs += both(f"{ours}.modulation", f"{theirs}.norm1.linear")
        for kind in ("weight", "bias"):
            qkv = tuple(f"{theirs}.attn1.to_{x}.{kind}" for x in "qkv")
            pairs.append(Weight(f"{ours}.attention.qkv.{kind}", qkv))
        pairs += both(f"{ours}.attention.output", f"{theirs}.attn1.to_out.0")
        pairs += both(f"{ours}.mlp.up", f"{theirs}.ff.net.0.proj")
        pairs += both(f"{ours}.mlp.down", f"{theirs}.ff.net.2")
    last = f"blocks.{config.num_layers + 1}"
    return pairs + both(f"{last}.modulation", "proj_out_1") + both(f"{last}.pixels", "proj_out_2")


def to_hf_config(config: "DiTConfig") -> dict[str, Any]:
    """The fields of a DiTTransformer2DModel's config. Raises ValueError for what it cannot express."""
    if config.num_classes is None or config.frequency_shift != FREQUENCY_SHIFT:
        raise ValueError(
            "diffusers' DiT always has classes and frequency_shift=1; this one has num_classes="
            f"{config.num_classes} and frequency_shift={config.frequency_shift}, which is another model"
        )
    return _FIXED | {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_size,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "num_layers": config.num_layers,
        "sample_size": config.sample_size,
        "patch_size": config.patch_size,
        "num_embeds_ada_norm": config.num_classes,
        "norm_eps": config.mlp_norm_eps,
    }


def from_hf_config(fields: dict[str, Any]) -> "DiTConfig":
    """Our config from a DiTTransformer2DModel's. Raises ValueError for settings that we do not compute."""
    from fmlab.models.diffusion.dit import DiTConfig

    refuse_other_than(_FIXED, fields)
    if fields.get("num_embeds_ada_norm", 1000) is None:
        raise ValueError("config.json sets num_embeds_ada_norm to null; only a DiT with classes is supported")
    heads = fields.get("num_attention_heads", 16)
    return DiTConfig(
        num_layers=fields.get("num_layers", 28),
        hidden_size=heads * fields.get("attention_head_dim", 72),
        num_heads=heads,
        patch_size=fields.get("patch_size", 2),
        in_channels=fields.get("in_channels", 4),
        out_channels=fields.get("out_channels") or fields.get("in_channels", 4),
        sample_size=fields.get("sample_size", 32),
        num_classes=fields.get("num_embeds_ada_norm", 1000),
        frequency_shift=FREQUENCY_SHIFT,
        embedder_per_layer=True,
        mlp_norm_eps=fields.get("norm_eps", 1e-5),
    )


FORMAT = HFFormat(
    "_class_name",
    "DiTTransformer2DModel",
    weights,
    to_hf_config,
    from_hf_config,
    stem="diffusion_pytorch_model",
)
