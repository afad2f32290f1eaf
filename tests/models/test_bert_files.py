"""BERT, RoBERTa and DistilBERT in Hugging Face's format, both ways, and the checkpoints of other years."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmlab.models import BERT, DistilBERT
from tests.models.bert_reference import FAMILIES, MODELS, small
from tests.models.reference import tokens

IDS = tokens(2, 9)


def same(a: BERT, b: BERT) -> None:
    assert a.config == b.config
    for (name, mine), (_, other) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize(("family", "heads"), MODELS)
def test_transformers_loads_what_we_save_and_back(tmp_path: Path, family: str, heads: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = small(family, heads, dropout=0.1).eval()
    model.save_pretrained(tmp_path / "ours")
    fields = json.loads((tmp_path / "ours" / "config.json").read_text())
    their_class = getattr(transformers, fields["architectures"][0])
    options = {"add_pooling_layer": False} if heads == "encoder" and family != "distilbert" else {}
    twin, report = their_class.from_pretrained(tmp_path / "ours", output_loading_info=True, **options)
    assert not any(report.values()), report
    result = {"encoder": "hidden", "pooled": "hidden", "classifier": "class_logits"}.get(heads, "logits")
    torch.testing.assert_close(twin.eval()(IDS)[0], model(IDS)[result], rtol=0, atol=1e-5)

    twin.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")  # cut into several files with an index
    overrides = (
        {"heads": heads} if options else {}
    )  # transformers does not write down that the pooler is left out
    same(FAMILIES[family].from_pretrained(tmp_path / "theirs", **overrides), model)


def rewrite(folder: Path, change: Any, **fields: Any) -> None:
    """Change the names of a saved checkpoint, and fields of its config (None: leave out)."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_checkpoints_of_2018_load(tmp_path: Path) -> None:
    """gamma and beta for the norms, a position buffer, copies of the table, a config with few fields."""
    model = small("bert", "pretraining", dropout=0.1)
    model.save_pretrained(tmp_path)

    def old(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        table = tensors["bert.embeddings.word_embeddings.weight"]
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
            for name, t in tensors.items()
        }
        return renamed | {
            "bert.embeddings.position_ids": torch.arange(48)[None],
            "cls.predictions.decoder.weight": table.clone(),
        }

    rewrite(
        tmp_path, old, architectures=None, classifier_dropout=None, tie_word_embeddings=None, is_decoder=None
    )
    same(BERT.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_encoder_loads_with_and_without_prefix(tmp_path: Path, family: str) -> None:
    model = small(family, "encoder")
    model.save_pretrained(tmp_path)
    assert "embeddings.word_embeddings.weight" in load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, lambda tensors: {f"{family}.{name}": t for name, t in tensors.items()})
    same(FAMILIES[family].from_pretrained(tmp_path), model)


def test_an_encoder_is_taken_out_of_a_model_with_other_heads(tmp_path: Path) -> None:
    model = small("bert", "pretraining").eval()
    model.save_pretrained(tmp_path)
    for heads, result in (("encoder", "hidden"), ("pooled", "pooled"), ("masked", "logits")):
        loaded = BERT.from_pretrained(tmp_path, heads=heads)
        assert torch.equal(loaded(IDS)[result], model(IDS)[result])
    with pytest.raises(ValueError, match=r"2 missing: classifier.bias, classifier.weight"):
        BERT.from_pretrained(tmp_path, heads="classifier")
    with pytest.raises(ValueError, match="a BERTConfig has no pooling; its fields are"):
        BERT.from_pretrained(tmp_path, pooling="mean")


REFUSED = {
    "activation": ({"hidden_act": "gelu_new"}, "hidden_act='gelu_new'; only 'gelu'"),
    "relative positions": ({"position_embedding_type": "relative_key"}, "only 'absolute' is supported"),
    "decoder": ({"is_decoder": True}, "is_decoder=True; only False"),
    "dropouts": ({"attention_probs_dropout_prob": 0.3}, r"different dropouts \[0.0, 0.3\]"),
    "regression": (
        {"architectures": ["BertForSequenceClassification"], "problem_type": "regression"},
        "only one class a row",
    ),
    "other head": (
        {"architectures": ["BertForTokenClassification"]},
        "supported are BertForMaskedLM, BertFor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_we_do_not_compute_are_refused(tmp_path: Path, case: str) -> None:
    fields, message = REFUSED[case]
    small().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors, **fields)
    with pytest.raises(ValueError, match=message):
        BERT.from_pretrained(tmp_path)


def test_unknown_names_and_other_families_are_refused(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"bert.encoder.layer.9.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"1 unexpected: bert.encoder.layer.9.extra"):
        BERT.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is for model_type 'bert'; 'distilbert' is needed here"):
        DistilBERT.from_pretrained(tmp_path)
