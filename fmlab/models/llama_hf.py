"""Llama and Qwen2 in Hugging Face's format: names, layouts, config fields (transformers' ...ForCausalLM)."""

from typing import TYPE_CHECKING, Any

from fmlab.models.attention.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from fmlab.models.hf import HFFormat, Weight, refuse_other_than

if TYPE_CHECKING:
    from fmlab.models.llama_config import LlamaConfig

# Settings that change the mathematics, with the only values we compute.
_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0}
_FIXED_LLAMA = _FIXED | {"attention_bias": False, "mlp_bias": False}
_FIXED_QWEN = _FIXED | {"use_sliding_window": False}


def stream_weights(config: "LlamaConfig") -> list[Weight]:
    """Our names beside theirs, for all but the second halves of the layers."""
    head = config.num_layers + 1
    pairs = [Weight("blocks.0.tokens.weight", "model.embed_tokens.weight")]
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i + 1}", f"model.layers.{i}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            key_value = (f"{theirs}.self_attn.k_proj.{kind}", f"{theirs}.self_attn.v_proj.{kind}")
            pairs += [
                Weight(f"{ours}.attention.query.{kind}", f"{theirs}.self_attn.q_proj.{kind}"),
                Weight(f"{ours}.attention.key_value.{kind}", key_value),
            ]
        pairs += [
            Weight(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight"),
            Weight(f"{ours}.attention.output.weight", f"{theirs}.self_attn.o_proj.weight"),
            Weight(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
        ]
    pairs.append(Weight(f"blocks.{head}.norm.weight", "model.norm.weight"))
    if not config.tie_embeddings:
        pairs.append(Weight(f"blocks.{head}.tokens.weight", "lm_head.weight"))
    return pairs


def weights(config: "LlamaConfig") -> list[Weight]:
    """Our names beside theirs. Keys and values, gate and up are one matrix here and two there."""
    pairs = stream_weights(config)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i + 1}.mlp", f"model.layers.{i}.mlp"
        gate_up = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
        pairs += [
            Weight(f"{ours}.gate_up.weight", gate_up),
            Weight(f"{ours}.down.weight", f"{theirs}.down_proj.weight"),
        ]
    return pairs


# ---- rotary scaling: our class, their "rope_type", and their names of our fields ------------------------

_SCALINGS: dict[str, tuple[type[RopeScaling], dict[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "dynamic": (DynamicNTKScaling, {"factor": "factor"}),
    "llama3": (
        Llama3Scaling,
        {
            "factor": "factor",
            "original_max_positions": "original_max_position_embeddings",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
        },
    ),
    "yarn": (
        YarnScaling,
        {
            "factor": "factor",
            "original_max_positions": "original_max_position_embeddings",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "given_attention_factor": "attention_factor",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
            "truncate": "truncate",
        },
    ),
}


def to_rope_parameters(scaling: RopeScaling | None, theta: float) -> dict[str, Any]:
    """The `rope_parameters` of a config.json."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    kind, names = next((kind, names) for kind, (cls, names) in _SCALINGS.items() if isinstance(scaling, cls))
    given = {theirs: getattr(scaling, ours) for ours, theirs in names.items()}
    return {"rope_type": kind, "rope_theta": theta} | {k: v for k, v in given.items() if v is not None}


def from_rope_parameters(fields: dict[str, Any], default_theta: float) -> tuple[RopeScaling | None, float]:
    """(scaling, theta) of a config.json, whether it has `rope_parameters` or the older `rope_scaling`.

    Raises ValueError for kinds and settings that we do not compute.
    """
    given = dict(fields.get("rope_scaling") or {}) or dict(fields.get("rope_parameters") or {})
    kind = given.pop("rope_type", None) or given.pop("type", "default")
    given.pop("type", None)
    theta = float(given.pop("rope_theta", None) or fields.get("rope_theta") or default_theta)
    if kind == "default":
        return None, theta
    if kind not in _SCALINGS:
        raise ValueError(
            f"rope_type={kind!r} is not supported; supported are default, {', '.join(_SCALINGS)}"
        )
    cls, names = _SCALINGS[kind]
    known = {theirs: ours for ours, theirs in names.items()} | {
        "original_max_position_embeddings": "original_max_positions"
    }
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"the {kind} rotary scaling in config.json sets {unknown}, which is not supported")
    settings = {known[name]: value for name, value in given.items() if value is not None}
    if kind == "linear":
        settings.pop("original_max_positions", None)  # written by some, read by nobody
    elif kind == "dynamic":
        settings["original_max_positions"] = fields["max_position_embeddings"]
    else:
        settings.setdefault("original_max_positions", fields["max_position_embeddings"])
    return cls(**settings), theta


# ---- config --------------------------------------------------------------------------------------------


def shared_fields(config: "LlamaConfig") -> dict[str, Any]:
    """The fields that LlamaConfig, Qwen2Config and MixtralConfig have in common."""
    rope = to_rope_parameters(config.rope_scaling, config.rope_theta)
    older = {k: v for k, v in rope.items() if k != "rope_theta"}  # what transformers before 5 reads
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": _trained_positions(config),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": older if config.rope_scaling else None,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def read_shared_fields(fields: dict[str, Any], default_theta: float = 10_000.0) -> dict[str, Any]:
    """Keyword arguments of a LlamaConfig from those fields; defaults are transformers' LlamaConfig's."""
    scaling, theta = from_rope_parameters(fields, default_theta)
    positions = fields.get("max_position_embeddings", 2048)
    if isinstance(scaling, DynamicNTKScaling):
        positions = int(positions * scaling.factor)  # there it is the length before the scaling
    return dict(
        vocab_size=fields.get("vocab_size", 32000),
        max_positions=positions,
        num_layers=fields.get("num_hidden_layers", 32),
        hidden_size=fields.get("hidden_size", 4096),
        num_heads=fields.get("num_attention_heads", 32),
        num_kv_heads=fields.get("num_key_value_heads"),
        ffn_size=fields.get("intermediate_size", 11008),
        head_size=fields.get("head_dim"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        init_std=fields.get("initializer_range", 0.02),
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


def _trained_positions(config: "LlamaConfig") -> int:
    """max_position_embeddings. Raises ValueError for a config that the format cannot say."""
    scaling = config.rope_scaling
    if not isinstance(scaling, DynamicNTKScaling):
        return config.max_positions
    if config.max_positions != int(scaling.original_max_positions * scaling.factor):
        raise ValueError(
            "with dynamic NTK scaling this format knows max_positions only as original_max_positions * "
            f"factor = {int(scaling.original_max_positions * scaling.factor)}; got {config.max_positions}"
        )
    return scaling.original_max_positions


def _to_llama(config: "LlamaConfig") -> dict[str, Any]:
    if config.qkv_bias:
        raise ValueError("a Llama in Hugging Face's format has no biases; save the model as a Qwen2")
    return _FIXED_LLAMA | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shared_fields(config),
    }


def _from_llama(fields: dict[str, Any]) -> "LlamaConfig":
    from fmlab.models.llama_config import LlamaConfig

    refuse_other_than(_FIXED_LLAMA, fields)
    return LlamaConfig(**read_shared_fields(fields))


def _to_qwen(config: "LlamaConfig") -> dict[str, Any]:
    if not config.qkv_bias:
        raise ValueError("a Qwen2 has biases on queries, keys and values: build it with qkv_bias=True")
    named = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return _FIXED_QWEN | named | shared_fields(config)


def _from_qwen(fields: dict[str, Any]) -> "LlamaConfig":
    from fmlab.models.llama_config import LlamaConfig

    refuse_other_than(_FIXED_QWEN, fields)
    defaults = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
    return LlamaConfig(**read_shared_fields(defaults | fields), qkv_bias=True)


def rename(config: "LlamaConfig", name: str) -> str:
    """Checkpoints saved from the bare model, without the head, lack the prefix."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def ignore(config: "LlamaConfig", name: str) -> bool:
    frequencies = name.endswith("rotary_emb.inv_freq")  # a buffer in old checkpoints
    return frequencies or (config.tie_embeddings and name == "lm_head.weight")


LLAMA = HFFormat("model_type", "llama", weights, _to_llama, _from_llama, rename, ignore)
QWEN2 = HFFormat("model_type", "qwen2", weights, _to_qwen, _from_qwen, rename, ignore)
