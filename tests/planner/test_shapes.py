"""Shapes count what the models hold: every preset, whole and divided."""

import re

import pytest
import torch

from fmlab.models import CLIPTextConfig, GPTConfig, LlamaConfig
from fmlab.models.clip_presets import TEXT_PRESETS, VISION_PRESETS
from fmlab.models.clip_text import CLIPText
from fmlab.models.clip_vision import CLIPVision
from fmlab.models.families import FAMILIES, family_of
from fmlab.planner import bert_shape, gpt_shape, llama_shape, model_shape, t5_shape
from fmlab.planner.shapes import ModelShape
from fmlab.sim.stages import weights_of

NONE = ("RecurrentLM", "CausalConvLM")
PRESETS = [(f, name) for f in FAMILIES if f.__name__ not in NONE for name in f.presets()]


@pytest.mark.parametrize(("family", "name"), PRESETS, ids=[name for _, name in PRESETS])
def test_every_preset_has_as_many_parameters_as_its_model(family: type, name: str) -> None:
    with torch.device("meta"):
        model = family.from_preset(name)  # type: ignore[attr-defined]
    shape = model_shape(name)
    assert shape.parameters == model.num_parameters()
    assert model_shape(model).parameters == shape.parameters
    if family.TOKEN_TABLES:  # type: ignore[attr-defined]
        tables = shape.parameters - model.num_parameters(embeddings=False, positions=False)
        types = sum(one.types * one.width for one in shape.embeddings)
        assert shape.embedding_parameters - types == tables


@pytest.mark.parametrize("heads", ["encoder", "pooled", "masked", "classifier"])
def test_the_heads_of_an_encoder_count(heads: str) -> None:
    family = family_of("bert-tiny")
    with torch.device("meta"):
        model = family.from_preset("bert-tiny", heads=heads, num_classes=7)
    assert model_shape(model).parameters == model.num_parameters()


def test_the_towers_of_clip_alone_count_too() -> None:
    for family, presets in ((CLIPText, TEXT_PRESETS), (CLIPVision, VISION_PRESETS)):
        for name in presets:
            with torch.device("meta"):
                model = family.from_preset(name)  # type: ignore[attr-defined]
            assert model_shape(model).parameters == model.num_parameters()
    assert isinstance(model_shape(CLIPTextConfig(**TEXT_PRESETS["clip-tiny"])), ModelShape)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("gpt2-tiny", 4), ("gpt2", 3), ("llama-tiny", 4), ("llama2-70b", 16), ("bert-tiny", 2), ("t5-tiny", 4),
     ("t5-v1.1-small", 2), ("unet-tiny", 2), ("clip-tiny", 2), ("dit-tiny", 2), ("qwen2.5-0.5b", 2)],
)  # fmt: skip
def test_a_tensor_rank_holds_what_the_plan_of_the_model_gives_it(name: str, tensor: int) -> None:
    with torch.device("meta"):
        model = family_of(name, FAMILIES).from_preset(name)
    first: set[str] = {group[0] for group in model.parallel_plan().tied}
    again = {n for group in model.parallel_plan().tied for n in group} - first
    held = sum(
        weight.numel
        for index in range(len(model.blocks))
        for weight in weights_of(model, index, tensor)
        if weight.name not in again
    )
    shape = model_shape(name)
    assert sum(part.count * part.on(tensor) for part in shape.parts) == held


def test_published_counts() -> None:
    assert model_shape("gpt2").parameters == 124_439_808
    assert model_shape("gpt3-175b").parameters == 174_604_259_328
    assert model_shape("llama3.1-405b").parameters == 405_853_388_800
    assert model_shape("mixtral-8x7b").parameters == 46_702_792_704
    assert model_shape("mixtral-8x7b").active_parameters == 12_879_925_248
    assert model_shape("t5-11b").parameters == 11_307_321_344
    assert model_shape("sd-1.5").parameters == 859_520_964
    assert model_shape("bert-large-uncased", heads="masked").parameters == 335_174_458


def test_shapes_by_sizes_are_those_of_the_presets() -> None:
    gpt = gpt_shape(layers=96, hidden=12288, heads=96, vocab=50257, positions=2048)
    assert gpt.parts == model_shape("gpt3-175b").parts
    llama = llama_shape(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000)
    assert llama.parts == model_shape("llama2-70b").parts
    bert = bert_shape(layers=24, hidden=1024, heads=16, vocab=30522)
    assert bert.parts == model_shape("bert-large-uncased").parts
    t5 = t5_shape(layers=24, hidden=1024, heads=128, head_width=128, ffn=65536, vocab=32128)
    assert t5.parts == model_shape("t5-11b").parts
    dense_first = llama_shape(
        layers=4, hidden=64, heads=4, ffn=32, vocab=128, experts=8, experts_per_token=2, shared_ffn=16,
        dense_layers=1, dense_ffn=256,
    )  # fmt: skip
    attention, norms = 4 * 64 * 64, 2 * 64
    mixture = 3 * 64 * (8 * 32 + 16) + 8 * 64
    layers = 4 * (attention + norms) + 3 * 64 * 256 + 3 * mixture
    assert dense_first.parameters == layers + 2 * 128 * 64 + 64


@pytest.mark.parametrize("layers", [24, 30, 36, 40, 48, 60, 80, 96, 105, 128])
def test_the_formula_of_sc21(layers: int) -> None:
    """P = 12 L h^2 (1 + 13/12h + (V+s)/12Lh), Narayanan et al. 2021, equation 2: all but the last norm."""
    h, vocab, s = 128 * layers, 51200, 2048
    formula = 12 * layers * h * h * (1 + 13 / (12 * h) + (vocab + s) / (12 * layers * h))
    shape = gpt_shape(layers=layers, hidden=h, heads=h // 128, vocab=vocab, positions=s)
    assert shape.parameters == pytest.approx(formula + 2 * h, rel=1e-12)


def test_lengths_of_a_row() -> None:
    assert model_shape("gpt2").lengths(1024) == {"tokens": 1024}
    assert model_shape("t5-base").lengths({"input": 512, "output": 114}) == {"input": 512, "output": 114}
    assert model_shape("t5-base").tokens(512) == 1024
    assert model_shape("clip-vit-b-32").lengths() == {"image": 50, "text": 77}
    assert model_shape("sd-1.5").lengths()["pixels/1"] == 4096
    assert model_shape("roberta-base").positions == 512  # of 514 rows, two are never given to a token


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: model_shape("gpt3-175"), "gpt3-175b"),
        (lambda: model_shape("gpt2", depth=3), "num_layers"),
        (lambda: model_shape("lstm-tiny"), "no formulas for"),
        (lambda: model_shape(175e9), "gpt_shape"),
        (lambda: model_shape(torch.nn.Linear(2, 2)), "no formulas for Linear"),
        (lambda: model_shape("gpt2").lengths(2048), "1024 positions"),
        (lambda: model_shape("gpt2").lengths(), "say how many tokens"),
        (lambda: model_shape("gpt2").lengths(0), "1 or more"),
        (lambda: model_shape("llama2-7b").lengths(10**12), "cannot be meant"),
        (lambda: model_shape("t5-base").lengths({"tokens": 5}), "input"),
        (lambda: gpt_shape(layers=2, hidden=100, heads=3, vocab=9), "does not divide"),
        (lambda: gpt_shape(layers=0, hidden=128, heads=4, vocab=9), "1 or more"),
        (lambda: gpt_shape(layers=2, hidden=128, heads=4, kv_heads=3, vocab=9), "legal are [1, 2, 4]"),
        (lambda: gpt_shape(layers=2, hidden=128, heads=4, vocab=9, gated=True), "ffn="),
        (lambda: gpt_shape(layers=2, hidden=10**12, heads=4, vocab=9), "cannot be meant"),
        (lambda: gpt_shape(layers=2, hidden=128, heads=4, vocab=9, ffn=8, experts=2), "experts_per_token=0"),
        (lambda: gpt_shape(layers=2, hidden=128, heads=4, vocab=9.5), "whole number"),
        (lambda: model_shape(GPTConfig(9, 8, 1, 8, 2)).parts[1].on(tensor=3), "legal are [1, 2]"),
    ],
)
def test_what_cannot_be_is_refused(ask, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        ask()


def test_a_model_that_was_changed_is_refused() -> None:
    with torch.device("meta"):
        model = family_of("gpt2-tiny").from_preset("gpt2-tiny")
        model.extra = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="would not see"):
        model_shape(model)


def test_a_config_is_as_good_as_a_preset() -> None:
    config = LlamaConfig(100, 64, 2, 48, 6, 96, num_kv_heads=2, head_size=16)
    shape = model_shape(config, vocab_size=200)
    assert (shape.vocab_size, shape.layers[0].query_width, shape.layers[0].kv_width) == (200, 96, 32)
