"""Hugging Face's format in both directions, strictly; damaged, foreign and pickled files are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmlab.models import GPT
from tests.models.gpt_reference import small_gpt, tokens

IDS = tokens(2, 9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_gpt().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("overrides", [{}, {"tie_embeddings": False}, {"ffn_size": 40, "vocab_size": 103}])
def test_transformers_loads_what_we_save_and_back(tmp_path: Path, overrides: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    model = small_gpt(**overrides).eval()
    model.save_pretrained(tmp_path / "ours")
    twin, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(twin.eval()(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)

    twin.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")  # cut into several files with an index
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    again = GPT.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    for (name, a), (_, b) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_old_checkpoints_without_prefix_and_with_mask_buffers_load(folder: Path) -> None:
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(folder / "model.safetensors").items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 48, 48) for i in range(3)}
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(GPT.from_pretrained(folder)(IDS).logits, small_gpt().eval()(IDS).logits)


def test_a_misfit_names_every_wrong_key(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.ln_1.bias"]
    tensors["transformer.h.7.extra"] = torch.zeros(1)
    tensors["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(96, 24)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit") as error:
        GPT.from_pretrained(folder)
    text = str(error.value)
    assert "1 missing: transformer.h.1.ln_1.bias" in text
    assert "1 unexpected: transformer.h.7.extra" in text
    assert "transformer.h.0.mlp.c_fc.weight is [96, 24], the model needs [24, 96]" in text


def test_a_vocabulary_that_differs_from_the_config_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    with pytest.raises(
        ValueError, match=r"transformer.wte.weight is \[101, 24\], the model needs \[128, 24\]"
    ):
        GPT.from_pretrained(folder)


def test_pickled_weights_load_only_if_they_are_plain_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(GPT.from_pretrained(folder)(IDS).logits, small_gpt().eval()(IDS).logits)

    torch.save(tensors | {"code": Path}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="refused; ask for a safetensors version"):
        GPT.from_pretrained(folder)


def corrupt(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor in sight")


def index_to_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"transformer.wte.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_config(**fields: object):  # type: ignore[no-untyped-def]
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


BROKEN = {
    "damaged": (corrupt, "damaged or not a safetensors file"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json; it holds model.safetensors"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "absent shard": (index_to_nothing, "names files that are not there: model-00001-of-00002"),
    "other family": (change_config(model_type="bert"), "'bert'; 'gpt2' is needed"),
    "other activation": (
        change_config(activation_function="relu"),
        "activation_function='relu'; only 'gelu_new'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_with_the_reason(folder: Path, case: str) -> None:
    breaks, message = BROKEN[case]
    breaks(folder)
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(folder)


def test_a_hub_repository_is_read_from_the_local_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real hub client, offline, over a cache laid out as it lays it out."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repo = tmp_path / "hub" / "models--someone--small"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    folder.rename(repo / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert torch.equal(GPT.from_pretrained("someone/small")(IDS).logits, small_gpt().eval()(IDS).logits)
    with pytest.raises(ValueError, match="neither a folder here nor a repository"):
        GPT.from_pretrained("someone/else")


def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        GPT.from_pretrained(tmp_path / "nowhere")
