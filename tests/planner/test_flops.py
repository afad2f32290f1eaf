"""FLOPs by each convention: against torch's counter, and against printed figures."""

import pytest
import torch

from fmlab.meter import flops as count
from fmlab.models import T5
from fmlab.models.families import FAMILIES, family_of
from fmlab.planner import gpt_shape, llama_shape, model_shape
from fmlab.planner.flops import CONVENTIONS, flops_per_step, forward_flops

A100 = 312e12
KORTHIKANTI = {  # layers, width, heads, rows, chips, seconds, MFU, HFU: arXiv:2205.05198, tables 3 and 5
    "22B": (48, 6144, 64, 4, 8, 1.10, 41.5, 43.7),
    "175B": (96, 12288, 96, 64, 64, 13.75, 51.4, 52.8),
    "530B": (105, 20480, 128, 280, 280, 37.83, 56.0, 57.0),
    "1T": (128, 25600, 160, 512, 512, 71.49, 56.3, 57.0),
}


def gpt(layers: int, width: int, heads: int):
    return gpt_shape(layers=layers, hidden=width, heads=heads, vocab=51200, positions=2048)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_utilisations_of_korthikanti_table_5(name: str) -> None:
    layers, width, heads, rows, chips, seconds, mfu, hfu = KORTHIKANTI[name]
    step = flops_per_step(gpt(layers, width, heads), rows, 2048, "korthikanti", recompute="selective")
    assert 100 * step.utilisation(seconds, chips, A100) == pytest.approx(mfu, abs=0.2)
    assert 100 * step.utilisation(seconds, chips, A100, hardware=True) == pytest.approx(hfu, abs=0.2)
    # what is executed: attention's forward pass once more, a third of what equation 8 adds
    real = flops_per_step(gpt(layers, width, heads), rows, 2048, recompute="selective")
    assert 3 * real.recomputation == pytest.approx(step.recomputation)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_equations_7_and_8(name: str) -> None:
    layers, h, heads, rows, *_ = KORTHIKANTI[name]
    base, s, vocab = 72 * rows * layers * 2048 * h * h, 2048, 51200
    step = flops_per_step(gpt(layers, h, heads), rows, s, "korthikanti", recompute="selective")
    assert step.model == pytest.approx(base * (1 + s / (6 * h) + vocab / (12 * h * layers)), rel=1e-12)
    assert step.hardware == pytest.approx(base * (1 + s / (3 * h) + vocab / (12 * h * layers)), rel=1e-12)


@pytest.mark.parametrize(
    ("chips", "seconds", "printed"), [(2240, 60.1, 126), (2800, 50.2, 121), (3360, 44.4, 113)]
)
def test_teraflops_of_megatron_turing_nlg(chips: int, seconds: float, printed: float) -> None:
    """Smith et al. 2022, arXiv:2201.11990, section 2.4: batch 1920, full recomputation counted."""
    step = flops_per_step(gpt(105, 20480, 128), 1920, 2048, recompute="full")
    assert step.per_chip_second(seconds, chips, hardware=True) / 1e12 == pytest.approx(printed, abs=0.6)
    # "40 % of peak" of the paper is of hardware FLOPs: the model's are a quarter fewer
    assert step.hardware / step.model == pytest.approx(4 / 3, rel=0.001)


def test_hardware_flops_of_sc21() -> None:
    layers, h, s, vocab, rows = 96, 12288, 2048, 51200, 1536
    formula = 96 * rows * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    step = flops_per_step(gpt(layers, h, 96), rows, s, recompute="full")
    assert step.hardware == pytest.approx(formula, rel=1e-12)


def test_gpt3_took_3_14e23() -> None:
    tokens = 300e9
    step = flops_per_step(model_shape("gpt3-175b"), 1, 2048, "6nd")
    assert step.model * tokens / 2048 == pytest.approx(3.14e23, rel=0.002)
    t5 = flops_per_step(model_shape("t5-11b"), 1, {"input": 512, "output": 512}, "6nd")
    n, d = model_shape("t5-11b").parameters, 1024
    # the decoder has its look at the encoder besides: its half is the larger one
    assert t5.model == pytest.approx(3 * n * d, rel=0.01)


def test_llama_405b_per_token() -> None:
    """430 / 400 / 380 TFLOP/s are 43 / 41 / 38 %: Dubey et al. 2024, table 4; 3.8e25 of 15.6T tokens."""
    step = flops_per_step(model_shape("llama3.1-405b"), 1, 8192, "6nd")
    assert step.model / 8192 * 15.6e12 == pytest.approx(3.8e25, rel=0.01)


def test_the_conventions_differ_by_what_they_say() -> None:
    shape, s = model_shape("llama2-7b"), 4096
    steps = {name: flops_per_step(shape, 2, s, name) for name in CONVENTIONS}
    full, half = steps["full-attention"], steps["causal-halved"]
    assert half.attention == full.attention / 2
    assert half.matmul == full.matmul
    table = shape.vocab_size * shape.width
    assert steps["6nd"].model == 6.0 * shape.parameters * 2 * s
    norms = shape.parameters - table - (full.matmul + full.logits) / (6 * 2 * s)
    assert norms == 65 * 4096
    assert steps["6n+attention"].model == steps["6nd"].model + full.attention
    assert (
        flops_per_step(shape, 2, s, "6nd", embeddings=False).model
        == 6.0 * (shape.parameters - 2 * table) * 2 * s
    )
    assert steps["neuron"].model - full.model == 3 * 2 * (2.0 * s * table + 3 * 32 * s * s * 32)
    assert steps["chinchilla"].logits == 0
    assert steps["6n+attention"].model > full.model > half.model


def test_windows_and_grouped_heads() -> None:
    sizes = dict(layers=2, hidden=256, heads=8, ffn=512, vocab=100)
    whole = flops_per_step(llama_shape(**sizes), 1, 512)
    windowed = flops_per_step(llama_shape(**sizes, window=128), 1, 512)
    assert windowed.attention == whole.attention / 4
    assert flops_per_step(llama_shape(**sizes, window=1024), 1, 512) == whole
    grouped = flops_per_step(llama_shape(**sizes, kv_heads=2), 1, 512)
    assert grouped.attention == whole.attention  # fewer projections, as many scores
    assert whole.matmul - grouped.matmul == 6 * 512 * 2 * 2 * 256 * 6 * 32


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "mixtral-tiny", "bert-tiny", "distilbert-tiny"])
def test_forward_flops_are_what_torch_counts(name: str) -> None:
    model = family_of(name).from_preset(name).eval()
    shape = model_shape(name)
    tokens = torch.arange(48).view(2, 24) + 5
    with count() as counted, torch.no_grad():
        model(tokens)
    one = forward_flops(shape, shape.lengths(24))
    masked = [head for head in shape.heads if not head.per_row]
    every = sum(2.0 * 24 * (head.outputs * head.width + head.dense) * (1 - head.reads) for head in masked)
    assert counted.total == 2 * (one.matmul + one.attention + one.logits + every)


def test_forward_flops_of_two_streams_are_what_torch_counts() -> None:
    model, shape = T5.from_preset("t5-tiny").eval(), model_shape("t5-tiny")
    with count() as counted, torch.no_grad():
        model(torch.ones(3, 20, dtype=torch.long), decoder_input_ids=torch.ones(3, 8, dtype=torch.long))
    one = forward_flops(shape, shape.lengths({"input": 20, "output": 8}))
    assert counted.total == 3 * (one.matmul + one.attention + one.logits)


def test_forward_flops_of_pictures_are_what_torch_counts() -> None:
    clip, shape = family_of("clip-tiny", FAMILIES).from_preset("clip-tiny").eval(), model_shape("clip-tiny")
    with count() as counted, torch.no_grad():
        clip(torch.zeros(2, 3, 32, 32), torch.full((2, 16), 3))
    one = forward_flops(shape, shape.lengths())
    assert counted.total == 2 * (one.matmul + one.attention)
    for name, text in (("unet-tiny", 11), ("dit-tiny", 11)):
        model = family_of(name, FAMILIES).from_preset(name).eval()
        shape = model_shape(name)
        with count() as counted, torch.no_grad():
            model(torch.zeros(2, 3, 32, 32), torch.tensor([1, 2]), torch.zeros(2, text, 128))
        one = forward_flops(shape, shape.lengths(text))
        assert counted.total == 2 * (one.matmul + one.attention)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(convention="6ND"), "6nd"),
        (dict(recompute="some"), "selective"),
        (dict(batch=0), "1 or more"),
        (dict(batch=2.5), "whole number"),
        (dict(seq_len=4096), "1024 positions"),
    ],
)
def test_what_cannot_be_is_refused(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        flops_per_step(model_shape("gpt2"), **(dict(batch=1, seq_len=64) | change))
    with pytest.raises(ValueError, match="above 0"):
        flops_per_step(model_shape("gpt2"), 1, 8).per_chip_second(0.0, 1)
