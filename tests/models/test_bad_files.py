"""Folders that would load as something else than what was saved are refused, or cannot come about."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmlab.models import CLIP, Llama
from fmlab.models.clip import CLIPConfig
from fmlab.models.clip_config import CLIPTextConfig, CLIPVisionConfig
from fmlab.models.diffusion.dit import DiT
from fmlab.models.diffusion.schedulers import DPMSolver2M

SHAPE: dict[str, Any] = dict(vocab_size=50, num_layers=1, hidden_size=16, num_heads=2, ffn_size=16)


def saved(folder: Path) -> Llama:
    model = Llama.from_preset("llama-tiny", **SHAPE)
    model.save_pretrained(folder)
    return model


def test_saving_over_a_checkpoint_in_several_files_replaces_it(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    names = load_file(tmp_path / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(tmp_path)
    for mine, loaded in zip(model.parameters(), Llama.from_pretrained(tmp_path).parameters(), strict=True):
        assert torch.equal(mine, loaded)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"rms_norm_eps": None}, "norm_eps must be a number"),
        ({"rope_scaling": {"rope_type": "linear"}}, "missing or of a wrong kind.*factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "wrong kind"),
    ],
)
def test_a_field_of_a_wrong_kind_is_refused(tmp_path: Path, changed: dict[str, Any], match: str) -> None:
    saved(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ValueError, match=match):
        Llama.from_pretrained(tmp_path)


def test_whole_numbers_without_scales_damaged_indexes_and_empty_models_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = {name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}
    save_file(whole, file)
    with pytest.raises(ValueError, match="quantised"):
        Llama.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say which file"):
        Llama.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(ValueError, match="not valid JSON"):
        Llama.from_pretrained(tmp_path)
    with torch.device("meta"):
        empty = Llama.from_preset("llama-tiny", **SHAPE)
    with pytest.raises(ValueError, match="meta device has no weights"):
        empty.save_pretrained(tmp_path / "other")


def test_a_solver_that_skips_timesteps_or_learns_its_variance_is_refused() -> None:
    # diffusers drops the timesteps whose lambda is below lambda_min_clipped
    for field, value in (("lambda_min_clipped", -5.1), ("variance_type", "learned_range")):
        with pytest.raises(ValueError, match=field):
            DPMSolver2M.from_fields({field: value})
    DPMSolver2M.from_fields({"lambda_min_clipped": -math.inf})


def test_a_field_of_a_nested_config_and_a_dit_without_classes_are_refused(tmp_path: Path) -> None:
    CLIP(
        CLIPConfig(CLIPTextConfig(50, 8, 1, 16, 2, eos_token_id=49), CLIPVisionConfig(8, 4, 1, 16, 2), 16)
    ).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    found = json.loads(file.read_text())
    found["text_config"]["layer_norm_eps"] = None
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="norm_eps must be a number"):
        CLIP.from_pretrained(tmp_path)
    file.write_text(json.dumps({"_class_name": "DiTTransformer2DModel", "num_embeds_ada_norm": None}))
    with pytest.raises(ValueError, match="only a DiT with classes"):
        DiT.from_pretrained(tmp_path)
