"""What every text model refuses before it starts, instead of a wrong number or an error from inside torch."""

import pytest
import torch
from torch import Tensor

from fmlab.models import BERT, CLIP, GPT, T5, Llama, RoBERTa
from fmlab.models.base import Model
from fmlab.models.clip import CLIPConfig
from fmlab.models.clip_config import CLIPTextConfig, CLIPVisionConfig
from fmlab.models.convolutional import CausalConvLM
from fmlab.models.diffusion.dit import DiT
from fmlab.models.diffusion.unet import UNet
from fmlab.models.recurrent import RecurrentLM
from fmlab.models.resnet import ResNet

SHAPE = dict(vocab_size=50, num_layers=1, hidden_size=16, num_heads=2)
IDS = torch.arange(3, 15).view(2, 6)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])


def make(family: str) -> Model:
    if family == "t5":
        return T5.from_preset("t5-tiny", **SHAPE, head_size=8, ffn_size=16)
    if family == "llama":
        return Llama.from_preset("llama-tiny", **SHAPE, ffn_size=16)
    if family == "clip":
        text = CLIPTextConfig(50, 8, 1, 16, 2, eos_token_id=14)
        return CLIP(CLIPConfig(text, CLIPVisionConfig(8, 4, 1, 16, 2), 16))
    if family in ("rnn", "conv"):
        sequence: type[Model] = RecurrentLM if family == "rnn" else CausalConvLM
        return sequence.from_preset(f"{family}-tiny", vocab_size=50, num_layers=2, hidden_size=16)
    cls: type[Model] = {"gpt": GPT, "bert": BERT, "roberta": RoBERTa}[family]
    name = "gpt2" if family == "gpt" else family
    return cls.from_preset(f"{name}-tiny", **SHAPE)


def run(model: Model, **batch: Tensor) -> None:
    batch = {"input_ids": IDS} | batch
    if isinstance(model, CLIP):
        batch["input_ids"] = batch["input_ids"].clone()
        batch["input_ids"][:, -1] = 14
        batch["pixel_values"] = torch.zeros(2, 3, 8, 8)
    if isinstance(model, T5):
        batch.setdefault("labels", IDS)
    model(**batch)


FAMILIES = ("gpt", "llama", "bert", "roberta", "t5", "clip", "rnn", "conv")


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_that_are_added_to_scores_and_ids_with_fractions_are_refused(family: str) -> None:
    model = make(family).eval()
    added = (1 - MASK.float()) * torch.finfo(torch.float32).min
    for mask in (added, MASK * torch.tensor([1, 1, 2, 2, 3, 3])):
        with pytest.raises(ValueError, match="attention_mask must be 1 for real tokens"):
            run(model, attention_mask=mask)
    for dtype in (torch.bool, torch.float32, torch.int32):
        run(model, attention_mask=MASK.to(dtype))
    run(model, input_ids=IDS.int())
    with pytest.raises(ValueError, match="input_ids must be whole numbers"):
        run(model, input_ids=IDS.float())
    if family != "clip":
        with pytest.raises(ValueError, match="labels must be whole numbers"):
            run(model, labels=IDS.float())


@pytest.mark.parametrize("family", ["unet", "dit"])
def test_diffusion_models_refuse_a_mask_that_is_added_and_a_text_or_class_that_is_none(family: str) -> None:
    cls: type[Model] = UNet if family == "unet" else DiT
    model = cls.from_preset(f"{family}-tiny").eval()
    sample, timestep, text = torch.zeros(1, 3, 32, 32), torch.tensor([3]), torch.zeros(1, 2, 128)
    model(sample, timestep, text, torch.tensor([[True, False]]))
    with pytest.raises(ValueError, match="encoder_attention_mask must be 1 for real tokens"):
        model(sample, timestep, text, torch.tensor([[0.0, -1e9]]))
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        model(sample, timestep, None)
    if family == "dit":
        classes = DiT.from_preset("dit-tiny", num_classes=3, text_size=None)
        with pytest.raises(ValueError, match="class_labels must be whole numbers"):
            classes(sample, timestep, class_labels=torch.tensor([1.0]))


def test_class_labels_of_32_bits_count_and_a_loss_in_float64_stays_there() -> None:
    model = ResNet.from_preset("resnet-tiny").double().eval()
    pictures = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    state = model(pictures, torch.tensor([1, 3], dtype=torch.int32))
    wanted = torch.nn.functional.cross_entropy(state.class_logits, torch.tensor([1, 3]), reduction="sum")
    assert state.class_loss_sum.dtype == torch.float64
    torch.testing.assert_close(state.class_loss_sum, wanted, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="class_labels must be whole numbers"):
        model(pictures, torch.tensor([1.0, 3.0]))


def test_other_heads_leave_the_encoder_as_it_is() -> None:
    model = BERT.from_preset("bert-tiny", **SHAPE)
    assert model.with_heads("classifier", num_classes=5)(IDS).class_logits.shape == (2, 5)
    for field in ("vocab_size", "num_layers"):  # came out with fresh weights, without a word
        with pytest.raises(ValueError, match="with_heads keeps the encoder"):
            model.with_heads("masked", **{field: 60})
