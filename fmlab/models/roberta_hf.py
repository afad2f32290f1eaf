"""RoBERTa in Hugging Face's format (transformers' RobertaModel and its heads)."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmlab.models import bert_hf
from fmlab.models.hf import HFFormat

if TYPE_CHECKING:
    from fmlab.models.roberta import RoBERTaConfig

NAMES = replace(
    bert_hf.NAMES,
    prefix="roberta.",
    classes={
        "encoder": "RobertaModel",
        "pooled": "RobertaModel",
        "masked": "RobertaForMaskedLM",
        "classifier": "RobertaForSequenceClassification",
    },
    heads={
        "encoder": (),
        "pooled": ({"dense": "roberta.pooler.dense"},),
        "masked": ({"dense": "lm_head.dense", "norm": "lm_head.layer_norm"},),
        "classifier": ({"dense": "classifier.dense"}, {"output": "classifier.out_proj"}),
    },
    bias="lm_head.bias",
    tied="lm_head.decoder.weight",
    aliases={"lm_head.decoder.bias": "lm_head.bias"},
)


def to_hf_config(config: "RoBERTaConfig") -> dict[str, Any]:
    """The fields of a RobertaConfig."""
    special = {"bos_token_id": 0, "eos_token_id": 2}
    return (
        {"architectures": [NAMES.classes[config.heads]], "model_type": "roberta"}
        | special
        | bert_hf.to_fields(config)
    )


def from_hf_config(fields: dict[str, Any]) -> "RoBERTaConfig":
    """Our config from a RobertaConfig's fields. Raises ValueError for settings that we do not compute."""
    from fmlab.models.roberta import RoBERTaConfig

    heads = NAMES.heads_of(fields, default="masked")
    return RoBERTaConfig(
        vocab_size=fields.get("vocab_size", 50265),
        pad_token=fields.get("pad_token_id", 1),
        **bert_hf.shared(fields, heads),
    )


FORMAT = HFFormat(
    "model_type", "roberta", NAMES.weights, to_hf_config, from_hf_config, NAMES.rename, NAMES.ignore
)
