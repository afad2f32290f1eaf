"""BERT in Hugging Face's format: names and config fields (transformers' BertModel and its heads)."""

from typing import TYPE_CHECKING, Any

from fmlab.models.bert_names import Names, class_fields, classes, one_dropout
from fmlab.models.hf import HFFormat, refuse_other_than

if TYPE_CHECKING:
    from fmlab.models.bert_config import BERTConfig

# Settings of a BertConfig that change the mathematics, with the only values we compute.
_FIXED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
EMBEDDING = {
    "tokens": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
LAYER: dict[str, str | tuple[str, ...]] = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_POOLER = {"dense": "bert.pooler.dense"}
_MASKED = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
}
NAMES = Names(
    prefix="bert.",
    classes={
        "encoder": "BertModel",
        "pooled": "BertModel",
        "masked": "BertForMaskedLM",
        "pretraining": "BertForPreTraining",
        "classifier": "BertForSequenceClassification",
    },
    embedding=EMBEDDING,
    layers="encoder.layer.{}",
    layer=LAYER,
    heads={
        "encoder": (),
        "pooled": (_POOLER,),
        "masked": (_MASKED,),
        "pretraining": (_POOLER, {"output": "cls.seq_relationship"}, _MASKED),
        "classifier": (_POOLER, {"output": "classifier"}),
    },
    bias="cls.predictions.bias",
    tied="cls.predictions.decoder.weight",
    aliases={"cls.predictions.decoder.bias": "cls.predictions.bias"},
)


def to_hf_config(config: "BERTConfig") -> dict[str, Any]:
    """The fields of a BertConfig."""
    return {"architectures": [NAMES.classes[config.heads]], "model_type": "bert"} | to_fields(config)


def from_hf_config(fields: dict[str, Any]) -> "BERTConfig":
    """Our config from a BertConfig's fields. Raises ValueError for settings that we do not compute."""
    from fmlab.models.bert_config import BERTConfig

    heads = NAMES.heads_of(fields, default="pretraining")
    return BERTConfig(
        vocab_size=fields.get("vocab_size", 30522),
        pad_token=fields.get("pad_token_id", 0),
        **shared(fields, heads),
    )


def to_fields(config: "BERTConfig") -> dict[str, Any]:
    """What a BertConfig and a RobertaConfig have in common."""
    fields = _FIXED | {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size,
        "type_vocab_size": config.token_types,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "classifier_dropout": config.classifier_dropout,
        "layer_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "pad_token_id": config.pad_token,
    }
    if config.heads == "encoder":  # ours: transformers leaves this to the caller
        fields["has_pooler"] = False
    return fields | (class_fields(config) if config.heads == "classifier" else {})


def shared(fields: dict[str, Any], heads: str) -> dict[str, Any]:
    """The arguments of our config that a BertConfig and a RobertaConfig give alike."""
    refuse_other_than(_FIXED, fields)
    return dict(
        max_positions=fields.get("max_position_embeddings", 512),
        num_layers=fields.get("num_hidden_layers", 12),
        hidden_size=fields.get("hidden_size", 768),
        num_heads=fields.get("num_attention_heads", 12),
        ffn_size=fields.get("intermediate_size", 3072),
        token_types=fields.get("type_vocab_size", 2),
        dropout=one_dropout(fields, "hidden_dropout_prob", "attention_probs_dropout_prob"),
        norm_eps=fields.get("layer_norm_eps", 1e-12),
        init_std=fields.get("initializer_range", 0.02),
        heads=heads,
        classifier_dropout=fields.get("classifier_dropout"),
        **(classes(fields) if heads == "classifier" else {}),
    )


FORMAT = HFFormat(
    "model_type", "bert", NAMES.weights, to_hf_config, from_hf_config, NAMES.rename, NAMES.ignore
)
