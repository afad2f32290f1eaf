"""CLIP's towers alone against transformers' CLIPTextModel and CLIPVisionModel on random weights."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fmlab.models import check_plan
from fmlab.models.clip_config import CLIPTextConfig
from fmlab.models.clip_hf import text_to_fields, text_weights
from fmlab.models.clip_text import CLIPText
from fmlab.models.clip_towers import quick_gelu
from tests.models.reference import assert_same_gradients, copy_weights, roughen, tokens

TEXT = CLIPTextConfig(101, 20, num_layers=3, hidden_size=24, num_heads=3, ffn_size=40, eos_token_id=100)
IDS = tokens(4, 11, vocab=100)
IDS[0, 4], IDS[1, 10], IDS[2, [3, 7]], IDS[3, 0] = 100, 100, 100, 100  # where each row ends
MASK = (torch.arange(11) < torch.tensor([[5], [11], [8], [1]])).long()


def small_text(**overrides: Any) -> CLIPText:
    torch.manual_seed(0)
    model = CLIPText(replace(TEXT, **overrides))
    roughen(model)
    return model


def text_twin(model: CLIPText) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    fields = text_to_fields(model.config)
    config = transformers.CLIPTextConfig(**{k: v for k, v in fields.items() if k != "model_type"})
    twin = transformers.CLIPTextModel(config)
    copy_weights(model, twin, text_weights(model.config))
    return twin


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("eos", [100, 2])  # 2: old checkpoints, pooled at the largest id
@pytest.mark.parametrize("padded", [False, True])
def test_the_text_tower_equals_transformers(activation: str, eos: int, padded: bool) -> None:
    model = small_text(activation=activation, eos_token_id=eos)
    twin = text_twin(model)
    mask = MASK if padded else None
    ours, theirs = model(IDS, mask), twin(IDS, attention_mask=mask)
    torch.testing.assert_close(ours.text_hidden, theirs.last_hidden_state, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.text_pooled, theirs.pooler_output, rtol=0, atol=1e-5)
    ends = IDS.argmax(-1)  # the same by either rule: 100 is the largest id
    assert torch.equal(ours.text_pooled, ours.text_hidden[torch.arange(4), ends])

    weight = torch.randn(ours.text_hidden.shape, generator=torch.Generator().manual_seed(2))
    (ours.text_hidden * weight).sum().add(ours.text_pooled.square().sum()).backward()
    (theirs.last_hidden_state * weight).sum().add(theirs.pooler_output.square().sum()).backward()
    assert_same_gradients(model, twin, text_weights(model.config))


def test_skipped_layers_equal_the_hidden_states_of_transformers() -> None:
    model = small_text().eval()
    twin = text_twin(model).eval()
    states = twin(IDS, output_hidden_states=True).hidden_states
    for skip in (0, 1, 2):
        expected = twin.final_layer_norm(states[-1 - skip])
        torch.testing.assert_close(model(IDS, skip_layers=skip).text_hidden, expected, rtol=0, atol=1e-5)


TEXT_COUNTS = {
    "clip-vit-b-32": 63_165_952,
    "clip-vit-l-14": 123_060_480,  # Stable Diffusion 1
    "openclip-vit-h-14-penultimate": 340_387_840,  # Stable Diffusion 2.1
}


@pytest.mark.parametrize("name", TEXT_COUNTS)
def test_text_presets_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        assert CLIPText.from_preset(name).num_parameters() == TEXT_COUNTS[name]


def test_files_of_the_text_tower_go_both_ways(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small_text(activation="gelu").eval()
    model.save_pretrained(tmp_path / "ours")
    twin, report = transformers.CLIPTextModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    hidden = twin.eval()(IDS).last_hidden_state
    torch.testing.assert_close(hidden, model(IDS).text_hidden, rtol=0, atol=1e-5)
    twin.save_pretrained(tmp_path / "theirs")
    again = CLIPText.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    assert torch.equal(again(IDS).text_hidden, model(IDS).text_hidden)

    file = tmp_path / "ours" / "model.safetensors"  # as released: prefixed, and with a buffer of positions
    assert all(name.startswith("text_model.") for name in load_file(file))
    save_file(load_file(file) | {"text_model.embeddings.position_ids": torch.arange(20)[None]}, file)
    assert torch.equal(CLIPText.from_pretrained(tmp_path / "ours")(IDS).text_hidden, again(IDS).text_hidden)
    config = tmp_path / "ours" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "relu"}))
    with pytest.raises(ValueError, match="hidden_act='relu'; supported are quick_gelu, gelu"):
        CLIPText.from_pretrained(tmp_path / "ours")


@pytest.mark.parametrize("batch", [{"input_ids": IDS}, {"input_ids": IDS, "attention_mask": MASK}])
def test_the_plan_of_the_text_tower_holds(batch: dict[str, torch.Tensor]) -> None:
    check_plan(small_text(), batch)


def test_the_text_tower_runs_in_double_on_meta_and_under_autocast() -> None:
    model = small_text().double()  # captured as one graph: see test_clip
    with torch.autocast("cpu", torch.bfloat16):
        rough = copy.deepcopy(model).float()(IDS).text_hidden
    assert (rough - model(IDS).text_hidden).norm() < 0.02 * rough.norm()
    with torch.device("meta"):
        small_text()(IDS.to("meta")).text_hidden.sum().backward()


def test_quick_gelu_is_the_sigmoid_approximation() -> None:
    assert abs(quick_gelu(torch.tensor(1.0)).item() - 0.845796) < 1e-6
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(quick_gelu(x), x * torch.sigmoid(1.702 * x), rtol=1e-13, atol=1e-15)
    assert torch.autograd.gradcheck(quick_gelu, x)


BAD = {
    "prompt too long": (lambda: small_text()(tokens(1, 21)), "prompt of 21 tokens .* encoder's 20 positions"),
    "no batch": (lambda: small_text()(IDS[0]), r"must be \[batch, length\]"),
    "mask's shape": (lambda: small_text()(IDS, MASK[:, 1:]), r"attention_mask must have the shape"),
    "skip": (lambda: small_text()(IDS, skip_layers=3), "skip_layers=3: legal are 0..2"),
    "eos": (lambda: small_text(eos_token_id=101), "outside the vocabulary: legal 0..100"),
    "activation": (lambda: small_text(activation="relu"), "legal are quick_gelu, gelu"),
    "heads": (lambda: small_text(num_heads=5), "does not divide hidden_size=24"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()
