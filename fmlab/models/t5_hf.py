"""T5 in Hugging Face's format: names and config fields (transformers' T5ForConditionalGeneration).

transformers 5.24 overrides `tie_word_embeddings` with True and keeps what it said as `scale_decoder_outputs`,
so its T5 v1.1 is tied when it is made from a config (60.5M parameters instead of 76.96M for small), and
untied only when it is loaded from a checkpoint whose two matrices differ.
"""

from typing import TYPE_CHECKING, Any

from fmlab.models.hf import HFFormat, Weight, refuse_other_than

if TYPE_CHECKING:
    from fmlab.models.t5 import T5Config

# Settings of a T5Config with the only values we compute.
_FIXED = {"is_encoder_decoder": True, "pad_token_id": 0, "decoder_start_token_id": 0}
_FEED_FORWARD = {"relu": False, "gated-gelu": True}  # -> gated


def weights(config: "T5Config") -> list[Weight]:
    """Our names beside theirs; three or two of their matrices are one of ours."""
    encoder_end = config.decoder_start - 1
    decoder = config.decoder_start + 1  # its first layer
    head = decoder + config.decoder_layers
    pairs = [
        Weight("blocks.0.tokens.weight", "shared.weight"),
        Weight(f"blocks.{encoder_end}.norm.weight", "encoder.final_layer_norm.weight"),
        Weight(f"blocks.{head}.norm.weight", "decoder.final_layer_norm.weight"),
    ]
    for i in range(config.num_layers):
        pairs += _layer(config, f"blocks.{1 + i}", f"encoder.block.{i}", first=i == 0, decoder=False)
    for i in range(config.decoder_layers):
        pairs += _layer(config, f"blocks.{decoder + i}", f"decoder.block.{i}", first=i == 0, decoder=True)
    if not config.tie_embeddings:
        pairs.append(Weight(f"blocks.{head}.tokens.weight", "lm_head.weight"))
    return pairs


def _layer(config: "T5Config", ours: str, theirs: str, first: bool, decoder: bool) -> list[Weight]:
    attention, cross, dense = (
        f"{theirs}.layer.0.SelfAttention",
        f"{theirs}.layer.1.EncDecAttention",
        f"{theirs}.layer.{1 + decoder}.DenseReluDense",
    )
    pairs = [
        Weight(f"{ours}.attention_norm.weight", f"{theirs}.layer.0.layer_norm.weight"),
        Weight(f"{ours}.attention.qkv.weight", tuple(f"{attention}.{x}.weight" for x in "qkv")),
        Weight(f"{ours}.attention.output.weight", f"{attention}.o.weight"),
        Weight(f"{ours}.mlp_norm.weight", f"{theirs}.layer.{1 + decoder}.layer_norm.weight"),
        Weight(f"{ours}.mlp.down.weight", f"{dense}.wo.weight"),
    ]
    if first:
        pairs.append(Weight(f"{ours}.position_bias.weight", f"{attention}.relative_attention_bias.weight"))
    if decoder:
        pairs += [
            Weight(f"{ours}.cross_norm.weight", f"{theirs}.layer.1.layer_norm.weight"),
            Weight(f"{ours}.cross.query.weight", f"{cross}.q.weight"),
            Weight(f"{ours}.cross.key_value.weight", (f"{cross}.k.weight", f"{cross}.v.weight")),
            Weight(f"{ours}.cross.output.weight", f"{cross}.o.weight"),
        ]
    if config.gated:
        pairs.append(Weight(f"{ours}.mlp.gate_up.weight", (f"{dense}.wi_0.weight", f"{dense}.wi_1.weight")))
    else:
        pairs.append(Weight(f"{ours}.mlp.up.weight", f"{dense}.wi.weight"))
    return pairs


def to_hf_config(config: "T5Config") -> dict[str, Any]:
    """The fields of a transformers T5Config."""
    return _FIXED | {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "d_kv": config.head_size,
        "d_ff": config.ffn_size,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_factor": config.init_factor,
        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": 1,
    }


def from_hf_config(fields: dict[str, Any]) -> "T5Config":
    """Our config from a transformers T5Config's. Raises ValueError for settings that we do not compute."""
    from fmlab.models.t5 import T5Config

    refuse_other_than(_FIXED, fields)
    feed_forward = fields.get("feed_forward_proj", "relu")
    if feed_forward not in _FEED_FORWARD:
        raise ValueError(
            f"config.json sets feed_forward_proj={feed_forward!r}; supported are {', '.join(_FEED_FORWARD)}"
        )
    return T5Config(
        vocab_size=fields.get("vocab_size", 32128),
        num_layers=fields.get("num_layers", 6),
        num_decoder_layers=fields.get("num_decoder_layers"),
        hidden_size=fields.get("d_model", 512),
        num_heads=fields.get("num_heads", 8),
        head_size=fields.get("d_kv", 64),
        ffn_size=fields.get("d_ff", 2048),
        gated=_FEED_FORWARD[feed_forward],
        # what transformers 5.24 saves: always tied, with the truth in the other field
        tie_embeddings=fields.get("tie_word_embeddings", True) and fields.get("scale_decoder_outputs", True),
        num_buckets=fields.get("relative_attention_num_buckets", 32),
        max_distance=fields.get("relative_attention_max_distance", 128),
        dropout=fields.get("dropout_rate", 0.1),
        norm_eps=fields.get("layer_norm_epsilon", 1e-6),
        init_factor=fields.get("initializer_factor", 1.0),
    )


def _ignore(config: "T5Config", name: str) -> bool:
    """Copies of the shared table, and the cross-attention bias that old files hold and nothing reads."""
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    copies += ["lm_head.weight"] if config.tie_embeddings else []
    return name in copies or name.endswith("EncDecAttention.relative_attention_bias.weight")


FORMAT = HFFormat("model_type", "t5", weights, to_hf_config, from_hf_config, ignore=_ignore)
