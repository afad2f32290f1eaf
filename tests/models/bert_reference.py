"""Small BERTs, RoBERTas and DistilBERTs beside transformers' models with the same random weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmlab.models import BERT, DistilBERT, RoBERTa
from fmlab.models.hf import Weight
from tests.models.reference import copy_weights, roughen, tokens

FAMILIES: dict[str, type[BERT]] = {"bert": BERT, "roberta": RoBERTa, "distilbert": DistilBERT}
#: Every family with every head.
MODELS = [(family, heads) for family, model in FAMILIES.items() for heads in model.CONFIG.HEADS]
PAD = {"bert": 0, "roberta": 1, "distilbert": 0}


def small(family: str = "bert", heads: str = "masked", seed: int = 0, **overrides: Any) -> BERT:
    """A model none of whose parameters is 0 or 1: biases and norms count in every comparison."""
    torch.manual_seed(seed)
    model = FAMILIES[family]
    shape = dict(vocab_size=101, max_positions=48, num_layers=2, hidden_size=24, num_heads=3)
    shape |= dict(num_classes=5) if heads == "classifier" else {}
    model = model(model.CONFIG(**(shape | dict(heads=heads) | overrides)))
    roughen(model, seed)
    return model


def weights(model: BERT) -> list[Weight]:
    return model.hf_format().weights(model.config)


def transformers_twin(model: BERT) -> nn.Module:
    """transformers' model of the same class, in eval mode, with the weights of `model`."""
    transformers = pytest.importorskip("transformers")
    fields = model.hf_format().to_fields(model.config)
    (name,) = fields.pop("architectures")
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    arguments = (
        {} if fields.get("has_pooler", True) or name == "DistilBertModel" else {"add_pooling_layer": False}
    )
    twin = getattr(transformers, name)(config, **arguments)
    copy_weights(model, twin, weights(model))
    return twin.eval()


def padded_batch(family: str, batch: int = 4, length: int = 17) -> dict[str, Tensor]:
    """Rows of several lengths, padded on the right; the last is padding altogether."""
    ids = tokens(batch, length).clamp(min=2)
    lengths = torch.tensor([length, length - 5, 3, 0])[:batch]
    real = (torch.arange(length) < lengths[:, None]).long()
    ids = ids.where(real.bool(), PAD[family])
    made = {"input_ids": ids, "attention_mask": real}
    if family == "bert":
        made["token_type_ids"] = (torch.arange(length) > lengths[:, None] // 2).long() * real
    return made


def labels_for(model: BERT, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Labels of every kind that the heads learn from: a third of the real tokens, all rows but one."""
    ids = batch["input_ids"]
    chosen = (tokens(*ids.shape, vocab=3, seed=5) == 0) & batch.get("attention_mask", ids > -1).bool()
    rows = torch.arange(len(ids))
    made = {
        "labels": tokens(*ids.shape, seed=6).where(chosen, -100),
        "sentence_labels": (rows % 2).where(rows != 1, -100),
        "class_labels": (rows % 5).where(rows != 2, -100),
    }
    return {name: made[name] for name in model.config.learns_from}
