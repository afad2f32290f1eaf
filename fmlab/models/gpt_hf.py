"""GPT in Hugging Face's GPT-2 format: names, layouts and config fields (transformers' GPT2LMHeadModel)."""

from typing import TYPE_CHECKING, Any

from fmlab.models.hf import HFFormat, Weight, refuse_other_than

if TYPE_CHECKING:
    from fmlab.models.gpt import GPTConfig

# Settings of a GPT2Config that change the mathematics, with the only values we compute.
_FIXED = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def weights(config: "GPTConfig") -> list[Weight]:
    """Our names beside theirs. Their linear layers (`Conv1D`) store [in, out], so those are transposed."""
    head = config.num_layers + 1
    pairs = [
        Weight("blocks.0.tokens.weight", "transformer.wte.weight"),
        Weight("blocks.0.positions.weight", "transformer.wpe.weight"),
    ]
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i + 1}", f"transformer.h.{i}"
        for kind in ("weight", "bias"):
            matrix = kind == "weight"
            pairs += [
                Weight(f"{ours}.attention_norm.{kind}", f"{theirs}.ln_1.{kind}"),
                Weight(f"{ours}.attention.qkv.{kind}", f"{theirs}.attn.c_attn.{kind}", matrix),
                Weight(f"{ours}.attention.output.{kind}", f"{theirs}.attn.c_proj.{kind}", matrix),
                Weight(f"{ours}.mlp_norm.{kind}", f"{theirs}.ln_2.{kind}"),
                Weight(f"{ours}.mlp.up.{kind}", f"{theirs}.mlp.c_fc.{kind}", matrix),
                Weight(f"{ours}.mlp.down.{kind}", f"{theirs}.mlp.c_proj.{kind}", matrix),
            ]
    pairs += [Weight(f"blocks.{head}.norm.{kind}", f"transformer.ln_f.{kind}") for kind in ("weight", "bias")]
    if not config.tie_embeddings:
        pairs.append(Weight(f"blocks.{head}.tokens.weight", "lm_head.weight"))
    return pairs


def to_hf_config(config: "GPTConfig") -> dict[str, Any]:
    """The fields of a GPT2Config."""
    end_of_text = 50256 if config.vocab_size == 50257 else None  # only GPT-2's own vocabulary fixes it
    return _FIXED | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_positions,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ffn_size,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def from_hf_config(fields: dict[str, Any]) -> "GPTConfig":
    """Our config from a GPT2Config's fields. Raises ValueError for settings that we do not compute."""
    from fmlab.models.gpt import GPTConfig

    refuse_other_than(_FIXED, fields)
    dropouts = {fields.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(dropouts) > 1:
        raise ValueError(
            f"config.json has different dropouts {sorted(dropouts)}; only one value is supported"
        )
    return GPTConfig(
        vocab_size=fields.get("vocab_size", 50257),
        max_positions=fields.get("n_positions", 1024),
        num_layers=fields.get("n_layer", 12),
        hidden_size=fields.get("n_embd", 768),
        num_heads=fields.get("n_head", 12),
        ffn_size=fields.get("n_inner"),
        dropout=dropouts.pop(),
        norm_eps=fields.get("layer_norm_epsilon", 1e-5),
        init_std=fields.get("initializer_range", 0.02),
        tie_embeddings=fields.get("tie_word_embeddings", True),
    )


def _rename(config: "GPTConfig", name: str) -> str:
    """Checkpoints saved from the bare GPT2Model lack the prefix."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _ignore(config: "GPTConfig", name: str) -> bool:
    old_mask = name.endswith((".attn.bias", ".attn.masked_bias"))
    return old_mask or (config.tie_embeddings and name == "lm_head.weight")


FORMAT = HFFormat("model_type", "gpt2", weights, to_hf_config, from_hf_config, _rename, _ignore)
