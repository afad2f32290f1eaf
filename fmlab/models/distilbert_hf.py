"""DistilBERT in Hugging Face's format (transformers' DistilBertModel and its heads)."""

from typing import TYPE_CHECKING, Any

from fmlab.models.bert_names import Names, class_fields, classes, one_dropout
from fmlab.models.hf import HFFormat, refuse_other_than

if TYPE_CHECKING:
    from fmlab.models.distilbert import DistilBERTConfig

# Settings of a DistilBertConfig that change the mathematics, with the only values we compute.
_FIXED = {"activation": "gelu", "sinusoidal_pos_embds": False, "tie_word_embeddings": True}
NAMES = Names(
    prefix="distilbert.",
    classes={
        "encoder": "DistilBertModel",
        "masked": "DistilBertForMaskedLM",
        "classifier": "DistilBertForSequenceClassification",
    },
    embedding={
        "tokens": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
    },
    layers="transformer.layer.{}",
    layer={
        "attention.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "mlp.up": "ffn.lin1",
        "mlp.down": "ffn.lin2",
        "mlp_norm": "output_layer_norm",
    },
    heads={
        "encoder": (),
        "masked": ({"dense": "vocab_transform", "norm": "vocab_layer_norm"},),
        "classifier": ({"dense": "pre_classifier"}, {"output": "classifier"}),
    },
    bias="vocab_projector.bias",
    tied="vocab_projector.weight",
    aliases={},
)


def to_hf_config(config: "DistilBERTConfig") -> dict[str, Any]:
    """The fields of a DistilBertConfig."""
    fields = _FIXED | {
        "architectures": [NAMES.classes[config.heads]],
        "model_type": "distilbert",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "n_layers": config.num_layers,
        "dim": config.hidden_size,
        "n_heads": config.num_heads,
        "hidden_dim": config.ffn_size,
        "dropout": config.dropout,
        "attention_dropout": config.dropout,
        "seq_classif_dropout": config.head_dropout,
        "initializer_range": config.init_std,
        "pad_token_id": config.pad_token,
    }
    return fields | (class_fields(config) if config.heads == "classifier" else {})


def from_hf_config(fields: dict[str, Any]) -> "DistilBERTConfig":
    """Our config from a DistilBertConfig's fields. Raises ValueError for settings that we do not compute."""
    from fmlab.models.distilbert import DistilBERTConfig

    refuse_other_than(_FIXED, fields)
    heads = NAMES.heads_of(fields, default="masked")
    dropout = one_dropout(fields, "dropout", "attention_dropout")
    classifier_dropout = fields.get("seq_classif_dropout", 0.2)
    return DistilBERTConfig(
        vocab_size=fields.get("vocab_size", 30522),
        max_positions=fields.get("max_position_embeddings", 512),
        num_layers=fields.get("n_layers", 6),
        hidden_size=fields.get("dim", 768),
        num_heads=fields.get("n_heads", 12),
        ffn_size=fields.get("hidden_dim", 3072),
        dropout=dropout,
        init_std=fields.get("initializer_range", 0.02),
        pad_token=fields.get("pad_token_id", 0),
        heads=heads,
        **(classes(fields) if heads == "classifier" else {}),
        classifier_dropout=None if classifier_dropout == dropout else classifier_dropout,
    )


FORMAT = HFFormat(
    "model_type", "distilbert", NAMES.weights, to_hf_config, from_hf_config, NAMES.rename, NAMES.ignore
)
