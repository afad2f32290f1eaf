"""CLIP and its image tower against transformers on random weights: numbers, gradients, files."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fmlab.models import check_plan
from fmlab.models.clip import CLIP, CLIPConfig
from fmlab.models.clip_config import CLIPTextConfig, CLIPVisionConfig
from fmlab.models.clip_hf import to_fields, vision_to_fields, vision_weights, weights
from fmlab.models.clip_towers import patchify
from fmlab.models.clip_vision import CLIPVision
from fmlab.models.state import live_names
from tests.models.reference import assert_same_gradients, copy_weights, roughen, tokens

TEXT = CLIPTextConfig(101, 12, num_layers=2, hidden_size=24, num_heads=3, eos_token_id=100)
VISION = CLIPVisionConfig(24, 8, num_layers=3, hidden_size=32, num_heads=2, ffn_size=56)
SMALL = CLIPConfig(TEXT, VISION, projection_size=20)
IDS = tokens(5, 9, vocab=100)
IDS[0, 8], IDS[1, 3], IDS[2, 0], IDS[3, 5], IDS[4, [2, 6]] = 100, 100, 100, 100, 100
MASK = (torch.arange(9) <= torch.tensor([8, 3, 0, 5, 2])[:, None]).long()
PIXELS = torch.randn(5, 3, 24, 24, generator=torch.Generator().manual_seed(3))


def small_clip(**overrides: Any) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(replace(SMALL, **overrides))
    roughen(model)
    return model


def twin_of(model: CLIP) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    fields = to_fields(model.config)
    twin = transformers.CLIPModel(transformers.CLIPConfig(**fields))
    copy_weights(model, twin, weights(model.config))
    return twin


def contrastive_loss(model: CLIP, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The definition: both directions' cross-entropy of the scaled products, averaged."""
    state = model(PIXELS.to(model.blocks[0].patches.dtype), IDS, mask)
    logits = state.logit_scale * state.image_embeddings @ state.text_embeddings.T
    target = torch.arange(len(logits))
    return (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("eos", [100, 2])
def test_embeddings_logits_loss_and_every_gradient_equal_transformers(padded: bool, eos: int) -> None:
    model = small_clip(text=replace(TEXT, eos_token_id=eos))
    twin = twin_of(model)
    mask = MASK if padded else None
    ours = model(PIXELS, IDS, mask)
    theirs = twin(input_ids=IDS, pixel_values=PIXELS, attention_mask=mask, return_loss=True)
    torch.testing.assert_close(ours.image_embeddings, theirs.image_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.text_embeddings, theirs.text_embeds, rtol=0, atol=1e-5)
    logits = ours.logit_scale * ours.image_embeddings @ ours.text_embeddings.T
    torch.testing.assert_close(logits, theirs.logits_per_image, rtol=0, atol=1e-5)
    loss = contrastive_loss(model, mask)
    assert abs(loss.item() - theirs.loss.item()) < 1e-6 * theirs.loss.item()
    loss.backward()
    theirs.loss.backward()
    assert_same_gradients(model, twin, weights(model.config))
    torch.testing.assert_close(model.encode_images(PIXELS), ours.image_embeddings, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.encode_texts(IDS, mask), ours.text_embeddings, rtol=0, atol=1e-6)


def test_the_image_tower_alone_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = CLIPVision(replace(VISION, activation="gelu"))
    roughen(model)
    twin = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**vision_to_fields(model.config)))
    copy_weights(model, twin, vision_weights(model.config))
    ours, theirs = model(PIXELS), twin(PIXELS)
    torch.testing.assert_close(ours.image_hidden, theirs.last_hidden_state, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.image_pooled, theirs.pooler_output, rtol=0, atol=1e-5)
    ours.image_hidden.square().sum().add(ours.image_pooled.sum()).backward()
    theirs.last_hidden_state.square().sum().add(theirs.pooler_output.sum()).backward()
    assert_same_gradients(model, twin, vision_weights(model.config))
    check_plan(model, {"pixel_values": PIXELS})


def test_patches_times_a_matrix_are_the_convolution_and_come_row_by_row() -> None:
    weight = torch.randn(7, 3, 8, 8, dtype=torch.float64)
    expected = nn.functional.conv2d(PIXELS.double(), weight, stride=8).flatten(2).mT
    got = patchify(PIXELS.double(), 8) @ weight.flatten(1).T
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert torch.equal(patchify(PIXELS, 8)[:, 5], PIXELS[:, :, 8:16, 16:24].flatten(1))  # row 1, column 2


# Counted by instantiating transformers' CLIPModel on the meta device.
COUNTS = {"clip-vit-b-32": 151_277_313, "clip-vit-b-16": 149_620_737, "clip-vit-l-14": 427_616_513}
IMAGE_COUNTS = {"clip-vit-b-32": 87_456_000, "clip-vit-b-16": 85_799_424, "clip-vit-l-14": 303_179_776}


@pytest.mark.parametrize("name", COUNTS)
def test_presets_have_the_number_of_parameters_of_the_reference(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = CLIP.from_preset(name)
        twin = transformers.CLIPModel(transformers.CLIPConfig(**to_fields(model.config)))
        assert CLIPVision.from_preset(name).num_parameters() == IMAGE_COUNTS[name]
    assert model.num_parameters() == COUNTS[name] == sum(p.numel() for p in twin.parameters())


def test_initial_weights_and_the_scale() -> None:
    torch.manual_seed(0)
    model = CLIP.from_preset("clip-tiny")
    head = model.blocks[-1]
    assert abs(head.log_scale.item() - 2.65926) < 1e-5  # ln(1 / 0.07)
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.numel() > 4000}
    for name, wanted in {
        "blocks.1.attention.qkv.weight": 128**-0.5,
        "blocks.1.attention.output.weight": (128 * 8) ** -0.5,  # 4 layers
        "blocks.8.mlp.up.weight": (2 * 128) ** -0.5,
        "blocks.8.mlp.down.weight": (128 * 6) ** -0.5,  # 3 layers
        "blocks.6.tokens.weight": 0.02,
        f"blocks.{len(model.blocks) - 1}.image_projection.weight": 128**-0.5,
    }.items():
        assert abs(stds[name] / wanted - 1) < 0.03, name


def test_the_scale_never_exceeds_100_and_can_come_back_from_there() -> None:
    model = small_clip()
    log_scale = model.blocks[-1].log_scale
    with torch.no_grad():
        log_scale.fill_(9.0)
    assert model.eval()(PIXELS, IDS).logit_scale <= 100
    assert log_scale == 9  # looking changes nothing
    loss = contrastive_loss(model.train())
    loss.backward()
    assert log_scale.item() == pytest.approx(4.60517)
    assert model(PIXELS, IDS).logit_scale.item() == pytest.approx(100, abs=1e-3)
    assert log_scale.grad is not None
    assert log_scale.grad.abs() > 1e-6


def test_files_go_both_ways(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small_clip().eval()
    model.save_pretrained(tmp_path / "ours")
    twin, report = transformers.CLIPModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    theirs = twin.eval()(input_ids=IDS, pixel_values=PIXELS)
    torch.testing.assert_close(theirs.image_embeds, model(PIXELS, IDS).image_embeddings, rtol=0, atol=1e-5)
    twin.save_pretrained(tmp_path / "theirs")
    again = CLIP.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    assert torch.equal(again(PIXELS, IDS).text_embeddings, model(PIXELS, IDS).text_embeddings)

    tower = CLIPVision(VISION).eval()
    tower.save_pretrained(tmp_path / "eyes")
    twin, report = transformers.CLIPVisionModel.from_pretrained(tmp_path / "eyes", output_loading_info=True)
    assert not any(report.values()), report
    twin.save_pretrained(tmp_path / "their eyes")
    seen = CLIPVision.from_pretrained(tmp_path / "their eyes")(PIXELS).image_hidden
    assert torch.equal(seen, tower(PIXELS).image_hidden)


@pytest.mark.parametrize("padded", [False, True])
def test_the_plan_holds_for_two_towers_in_one_list(padded: bool) -> None:
    batch = {"pixel_values": PIXELS, "input_ids": IDS} | ({"attention_mask": MASK} if padded else {})
    model = small_clip()
    check_plan(model, batch)
    assert live_names(list(model.blocks), 2) == ["image_hidden", "input_ids", "attention_mask"]
    assert live_names(list(model.blocks), 7) == ["text_hidden", "attention_mask", "input_ids", "image_pooled"]


def test_it_runs_captured_in_double_on_meta_and_under_autocast() -> None:
    model = small_clip().double()
    captured = torch.compile(lambda: contrastive_loss(model), fullgraph=True, backend="aot_eager")
    parameters = list(model.parameters())
    got = torch.autograd.grad(captured(), parameters)
    want = torch.autograd.grad(contrastive_loss(model), parameters)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    with torch.autocast("cpu", torch.bfloat16):
        state = copy.deepcopy(model).float()(PIXELS, IDS)
    assert state.image_embeddings.dtype == torch.float32
    assert (state.image_embeddings - model(PIXELS.double(), IDS).image_embeddings).norm() < 0.05
    with torch.device("meta"):
        large = CLIP.from_preset("clip-vit-b-32")
        state = large(torch.empty(2, 3, 224, 224), torch.zeros(2, 77, dtype=torch.long))
        (state.image_embeddings @ state.text_embeddings.T).sum().backward()
    assert large.get_parameter("blocks.0.patches").grad is not None


BAD = {
    "patch": (lambda: replace(VISION, patch_size=7), r"24 pixels.*legal patch_size: \[1, 2, 3, 4, 6, "),
    "channels": (lambda: small_clip()(PIXELS[:, :1], IDS), r"3 channels, 24, 24\], got \[5, 1, 24, 24\]"),
    "size": (lambda: small_clip()(PIXELS[..., :16, :16], IDS), r"got \[5, 3, 16, 16\]; resize"),
    "bytes": (lambda: small_clip()((PIXELS * 99).byte(), IDS), "normalised numbers .*uint8"),
    "prompt": (lambda: small_clip()(PIXELS, tokens(5, 13)), "13 tokens is longer .* 12 positions"),
    "no end": (lambda: small_clip()(PIXELS, IDS.clamp(max=99)), r"row 0 .* no end-of-text token \(100\)"),
    "preset": (lambda: CLIP.from_preset("clip-b-32"), "Did you mean 'clip-vit-b-32'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def test_bf16_autocast_errs_no_more_than_twice_what_transformers_does() -> None:
    text = replace(TEXT, hidden_size=96, num_heads=4)
    model = small_clip(text=text, vision=replace(VISION, hidden_size=96, num_heads=4, ffn_size=384))
    twin = twin_of(model)
    exact = copy.deepcopy(model).double()
    contrastive_loss(exact).backward()
    with torch.autocast("cpu", torch.bfloat16):
        contrastive_loss(model).backward()
        twin(input_ids=IDS, pixel_values=PIXELS, return_loss=True).loss.backward()
    squares = {"ours": 0.0, "theirs": 0.0}
    for weight in weights(model.config):
        wanted, ours = (m.get_parameter(weight.ours).grad for m in (exact, model))
        theirs = weight.join([twin.get_parameter(name).grad for name in weight.names])
        assert ours.dtype == torch.float32
        squares["ours"] += float((ours - wanted).square().sum())
        squares["theirs"] += float((theirs - wanted).square().sum())
    assert squares["ours"] <= 4 * squares["theirs"]
