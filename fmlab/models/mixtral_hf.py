"""Mixtral in Hugging Face's format: names, layouts and config fields (transformers' MixtralForCausalLM)."""

from typing import TYPE_CHECKING, Any

from fmlab.models.hf import HFFormat, Weight, refuse_other_than
from fmlab.models.llama_hf import ignore, read_shared_fields, rename, shared_fields, stream_weights

if TYPE_CHECKING:
    from fmlab.models.mixtral import MixtralConfig

# Settings that change the mathematics, with the only values we compute.
_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0, "sliding_window": None, "router_jitter_noise": 0.0}


def weights(config: "MixtralConfig") -> list[Weight]:
    """Our names beside theirs. A file holds each expert's three matrices apart: w1 gate, w3 up, w2 down."""
    pairs = stream_weights(config)
    experts = range(config.num_experts)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i + 1}.mlp", f"model.layers.{i}.block_sparse_moe"
        gate_up = tuple(f"{theirs}.experts.{e}.{w}.weight" for e in experts for w in ("w1", "w3"))
        down = tuple(f"{theirs}.experts.{e}.w2.weight" for e in experts)
        pairs += [
            Weight(f"{ours}.router.weight", f"{theirs}.gate.weight"),
            Weight(f"{ours}.gate_up", gate_up, stacked=config.num_experts),
            Weight(f"{ours}.down", down, stacked=config.num_experts),
        ]
    return pairs


def to_hf_config(config: "MixtralConfig") -> dict[str, Any]:
    """The fields of a MixtralConfig. Raises ValueError for a capacity, which the format cannot say."""
    if config.capacity_factor is not None:
        raise ValueError(
            "a Mixtral in Hugging Face's format never drops a token; save a model with capacity_factor=None"
        )
    if config.qkv_bias:
        raise ValueError("a Mixtral in Hugging Face's format has no biases")
    return _FIXED | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **shared_fields(config),
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
    }


def from_hf_config(fields: dict[str, Any]) -> "MixtralConfig":
    """Our config from a MixtralConfig's fields. Raises ValueError for settings that we do not compute."""
    from fmlab.models.mixtral import MixtralConfig

    refuse_other_than(_FIXED, fields)
    defaults = {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }
    return MixtralConfig(
        **read_shared_fields(defaults | fields, default_theta=1_000_000.0),
        num_experts=fields.get("num_local_experts", 8),
        experts_per_token=fields.get("num_experts_per_tok", 2),
    )


MIXTRAL = HFFormat("model_type", "mixtral", weights, to_hf_config, from_hf_config, rename, ignore)
