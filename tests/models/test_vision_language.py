"""The vision-language decoder against transformers' LlavaForConditionalGeneration on random weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fmlab.models import CLIPVisionConfig, LlamaConfig, check_plan
from fmlab.models.state import live_names
from fmlab.models.vision_language import VisionLanguage, VisionLanguageConfig
from fmlab.models.vision_language_hf import to_fields, weights
from tests.models.reference import assert_same_gradients, copy_weights, roughen, tokens

SMALL = VisionLanguageConfig(
    CLIPVisionConfig(16, 8, num_layers=3, hidden_size=24, num_heads=2),
    LlamaConfig(61, 32, num_layers=2, hidden_size=32, num_heads=4, ffn_size=48, num_kv_heads=2),
    image_token_id=60,
)
PIXELS = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(3))
IDS = tokens(3, 12, vocab=60)
IDS[0, 0:4] = IDS[1, 3:7] = IDS[2, 1:5] = 60
LABELS = torch.full_like(IDS, -100)
LABELS[:, 7:11] = IDS[:, 8:12]  # the caption; row 1's image ends at 6


def small(**overrides: Any) -> VisionLanguage:
    torch.manual_seed(0)
    model = VisionLanguage(replace(SMALL, **overrides))
    roughen(model)
    return model


def in_memory(config: VisionLanguageConfig) -> list[Any]:
    return weights(
        config, "model.vision_tower.", "model.multi_modal_projector.", "model.language_model.", "lm_head."
    )


def twin_of(model: VisionLanguage) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    twin = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**to_fields(model.config)))
    copy_weights(model, twin, in_memory(model.config))
    return twin


@pytest.mark.parametrize("layer", [-1, -2, -3])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_loss_and_every_gradient_equal_transformers(layer: int, tied: bool) -> None:
    keep = layer == -1
    text = replace(SMALL.text, tie_embeddings=tied)
    model = small(feature_layer=layer, keep_class_token=keep, text=text)
    twin = twin_of(model)
    ids = IDS.clone()
    if keep:
        ids[:, 7] = 60  # five places an image
    logits = model(ids, PIXELS).logits
    torch.testing.assert_close(logits, twin(input_ids=ids, pixel_values=PIXELS).logits, rtol=0, atol=1e-5)
    labels = LABELS.clone()
    labels[1, 7] = -100
    loss = model(ids, PIXELS, labels).loss_sum / (labels != -100).sum()
    loss.backward()
    unshifted = torch.cat([torch.full_like(ids[:, :1], -100), labels[:, :-1]], 1)
    theirs = twin(input_ids=ids, pixel_values=PIXELS, labels=unshifted).loss
    theirs.backward()
    assert abs(loss.item() - theirs.item()) < 1e-6 * theirs.item()
    assert_same_gradients(model, twin, in_memory(model.config))


def test_padding_two_images_in_a_row_and_text_alone_equal_transformers() -> None:
    model = small().eval()
    twin = twin_of(model).eval()
    ids = tokens(2, 14, vocab=60)
    ids[0, 1:5] = ids[0, 6:10] = ids[1, 5:9] = 60
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = dict(input_ids=ids, pixel_values=PIXELS, attention_mask=mask)
    theirs = twin(**batch, position_ids=positions).logits
    ours = model(**batch).logits
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=0, atol=1e-5)
    words = tokens(2, 5, vocab=60)
    torch.testing.assert_close(model(words).logits, twin(input_ids=words).logits, rtol=0, atol=1e-5)


def test_captions_from_the_cache_equal_transformers_generate() -> None:
    from fmlab.train.generate import generate_ids

    model = small().eval()
    twin = twin_of(model).eval()
    prompts = IDS[:, :8]
    theirs = twin.generate(
        input_ids=prompts,
        pixel_values=PIXELS,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ours = generate_ids(model.looking_at(PIXELS), prompts.tolist(), 1000, max_new_tokens=8, greedy=True)
    assert ours == theirs[:, 8:].tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_files_go_both_ways(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = small(text=replace(SMALL.text, tie_embeddings=tied)).eval()
    model.save_pretrained(tmp_path / "ours")
    twin, report = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    logits = model(IDS, PIXELS).logits
    theirs = twin.eval()(input_ids=IDS, pixel_values=PIXELS).logits
    torch.testing.assert_close(theirs, logits, rtol=0, atol=1e-5)
    twin.save_pretrained(tmp_path / "theirs")
    again = VisionLanguage.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    assert torch.equal(again(IDS, PIXELS).logits, logits)


BATCHES = {
    "logits": {"input_ids": IDS, "pixel_values": PIXELS},
    "loss": {"input_ids": IDS, "pixel_values": PIXELS, "labels": LABELS},
    "padded": {"input_ids": IDS, "pixel_values": PIXELS, "attention_mask": torch.ones_like(IDS)},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_holds(batch: str, tied: bool) -> None:
    model = small(text=replace(SMALL.text, tie_embeddings=tied))
    check_plan(model, BATCHES[batch])
    live = live_names(list(model.blocks), 2)
    assert live[:2] == ["image_hidden", "input_ids"]
    assert "pixel_values" not in live


def test_a_frozen_tower_gets_no_gradient_and_what_is_not_run_never_does() -> None:
    model = small().freeze_vision()
    model(IDS, PIXELS, LABELS).loss_sum.backward()
    learning = {name.split(".")[1] for name, p in model.named_parameters() if p.grad is not None}
    assert learning == {"4", "5", "6", "7", "8"}  # projector, embedding, two layers, head
    thawed = model.freeze_vision(False)
    thawed(IDS, PIXELS, LABELS).loss_sum.backward()
    still = {name for name, p in thawed.named_parameters() if p.grad is None}
    assert still == {name for name, _ in thawed.named_parameters() if name.startswith("blocks.3.")}


def test_it_runs_captured_in_double_and_is_counted_on_meta() -> None:
    model = small().double()
    pixels = PIXELS.double()

    def loss() -> torch.Tensor:
        return model(IDS, pixels, LABELS).loss_sum

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")
    used = [p for name, p in model.named_parameters() if not name.startswith("blocks.3.")]
    got, want = torch.autograd.grad(captured(), used), torch.autograd.grad(loss(), used)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    with torch.device("meta"):
        # CLIP ViT-L/14 at 336 pixels, the projector, and Llama-2 7B with 64 more tokens
        assert VisionLanguage.from_preset("llava-1.5-7b").num_parameters() == 7_063_427_072


BAD = {
    "too few places": (lambda: small()(IDS[:, 1:], PIXELS), r"3 \* 4 = 12 image tokens \(60\).*has 11"),
    "no image": (lambda: small()(IDS), "0 images need .* has 12"),
    "channels": (lambda: small()(IDS, PIXELS[:, :2]), r"3 channels, 16, 16\], got \[3, 2, 16, 16\]"),
    "too long": (lambda: small()(tokens(1, 33, vocab=60)), "33 tokens is longer than the model's 32"),
    "layer": (lambda: small(feature_layer=-4), r"legal are -1 .* to -3"),
    "token": (lambda: small(image_token_id=61), r"legal 0..60"),
    "cache": (lambda: small().new_cache(1, 33), "exceeds the model's 32"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()
