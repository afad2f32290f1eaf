"""Serving, held to what can be worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from fmlab.planner import Calibration, llama_shape, model_shape, serve_plan
from fmlab.planner.hardware import hardware
from fmlab.planner.parts import LayerGroup

#: every share 1, nothing waits: what is left is the chip's own figures
PLAIN = Calibration(
    matmul_default=1.0, memory=1.0, attention=1.0, inside=1.0, hop_inside=0.0, reserve=0.0, context_bytes=0.0,
    matmul={"h100": 1.0},
)  # fmt: skip
H100 = hardware("h100", calibration=PLAIN)
LLAMA: dict[str, Any] = dict(prompt=1024, generated=1, machine=H100)


def test_the_cache_of_published_models() -> None:
    """Llama 3.1 8B: 32 layers x 2 x 8 heads x 128 x 2 bytes = 128 KiB a token; 70B: 80 layers, 320 KiB;
    GPT-3: 96 x 2 x 12,288 x 2 bytes = 4.5 MiB."""
    for name, kib in (("llama3.1-8b", 128), ("llama3.1-70b", 320), ("gpt3-175b", 4608)):
        assert serve_plan(name, **LLAMA).cache_bytes(1) == kib * 1024
    eight = serve_plan("llama3.1-70b", tensor=8, **LLAMA)
    assert eight.cache_bytes(1) == 40 * 1024
    assert serve_plan("llama3.1-70b", tensor=8, cache="fp8", **LLAMA).cache_bytes(1) == 20 * 1024
    # of 8 key/value heads, 16 ranks have one each, twice
    assert serve_plan("llama3.1-70b", tensor=16, **LLAMA).cache_bytes(1) == 40 * 1024


def test_one_sequence_waits_for_the_weights() -> None:
    one = serve_plan("llama3.1-8b", **LLAMA)
    shape = model_shape("llama3.1-8b")
    read = (
        shape.parameters - shape.vocab_size * 4096 - 65 * 4096
    ) * 2  # no table is read, and no norms counted
    assert one.decode(1)["matrices"] == pytest.approx(read / 3.35e12)
    assert one.decode(4096)["attention"] == pytest.approx(4096 * 128 * 1024 / 3.35e12)
    assert one.bound == "matrices"
    assert one.memory["weights"] == shape.parameters * 2
    half = serve_plan("llama3.1-8b", weights="int8", **LLAMA)
    assert half.decode(1)["matrices"] == pytest.approx(read / 2 / 3.35e12)


def test_many_sequences_share_the_weights_until_products_take_longer() -> None:
    """On an H100 (989 TFLOP/s, 3.35 TB/s) 16-bit weights are read as fast as 295 sequences multiply them."""
    one = serve_plan("llama3.1-8b", **LLAMA)
    few, many, most = (other.decode(1)["matrices"] for other in one.over((1, 290, 600)))
    assert few == many
    assert most == pytest.approx(few * 600 / (989.4e12 / 3.35e12), rel=0.01)
    curve = one.over((1, 4, 16, 64))
    assert [a.tokens_per_second for a in curve] == sorted(a.tokens_per_second for a in curve)
    assert [a.each_token for a in curve] == sorted(a.each_token for a in curve)


def test_the_first_token_takes_two_flops_a_parameter_and_position() -> None:
    calibration = PLAIN.changed(rows_half=0.0, width_half=0.0)
    one = serve_plan("llama3.1-8b", prompt=2048, generated=1, chip="h100", calibration=calibration)
    layers = 2 * 2048 * 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    head = 4096 * 128256 * 2 / 3.35e12  # of the last position: its matrix is read
    assert one.prefill["matrices"] == pytest.approx(layers / H100.peak("bf16") + head)
    assert one.prefill["attention"] == pytest.approx(4 * 2048**2 / 2 * 4096 * 32 / H100.peak("bf16"))
    assert one.seconds == one.first_token


def test_tensor_ranks_divide_what_is_read_and_pay_with_messages() -> None:
    calibration = PLAIN.changed(hop_inside=3e-6)
    settings: dict[str, Any] = dict(chip="h100", calibration=calibration, prompt=128, generated=128)
    one, eight = (serve_plan("llama3.1-8b", tensor=n, **settings) for n in (1, 8))
    assert eight.decode(256)["matrices"] == pytest.approx(one.decode(256)["matrices"] / 8)
    assert eight.decode(256)["attention"] == pytest.approx(one.decode(256)["attention"] / 8)
    assert one.decode(256)["messages"] == 0
    # 64 all-reduces and one gather, whose shortest algorithms take 6 and 3 steps
    assert eight.decode(256)["messages"] >= (64 * 6 + 3) * 3e-6
    assert eight.decode(256)["messages"] == pytest.approx((64 * 6 + 3) * 3e-6, rel=0.1)
    assert eight.each_token < one.each_token


def test_the_last_token_waits_longest_and_the_mean_is_between() -> None:
    one = serve_plan("llama3.1-8b", prompt=100, generated=1001, batch=64, machine=H100)
    steps = [sum(one.decode(100 + step).values()) for step in range(1, 1001)]
    assert one.each_token == pytest.approx(sum(steps) / 1000)
    assert steps[0] < one.each_token < steps[-1]
    assert one.tokens_per_second == pytest.approx(64 * 1001 / (one.first_token + sum(steps)))


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    one = serve_plan("llama3.1-70b", chip="h100", tensor=8, prompt=1024, generated=1024)
    most, more = one.over((one.largest_batch, one.largest_batch + 1))
    assert one.largest_batch > 100
    assert most.fits
    assert not more.fits
    alone = serve_plan("llama3.1-70b", chip="h100", prompt=1024, generated=1024)
    assert not alone.fits
    assert alone.largest_batch == 0
    assert "does NOT fit" in str(alone)


def test_a_batch_meets_most_experts_and_a_window_bounds_the_cache() -> None:
    """8 experts, 2 a token: one token reads 2 of them, 32 tokens almost all, each computes 2."""
    sizes: dict[str, Any] = dict(layers=1, hidden=1024, heads=8, ffn=65536, vocab=64)
    mixture = llama_shape(experts=8, experts_per_token=2, **sizes)
    one, many = (serve_plan(mixture, batch=n, **LLAMA).decode(1)["matrices"] for n in (1, 32))
    assert many / one == pytest.approx(4, rel=0.02)
    wide = model_shape("llama3.1-8b")
    parts = tuple(replace(p, window=512) if isinstance(p, LayerGroup) else p for p in wide.parts)
    narrow = serve_plan(replace(wide, parts=parts), prompt=256, generated=1024, machine=H100)
    assert narrow.cache_bytes(1280) == 512 * 128 * 1024
    steps = [narrow.decode(256 + step)["attention"] for step in range(1, 1024)]
    rest = narrow.each_token - narrow.decode(1)["matrices"]
    assert rest == pytest.approx(sum(steps) / 1023)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(model="bert-large-uncased"), "no decoder"),
        (dict(model="t5-base"), "no decoder"),
        (dict(model="sd-1.5"), "no decoder"),
        (dict(tensor=5), "legal are"),
        (dict(model="mixtral-8x7b", tensor=3), "legal are"),
        (dict(batch=0), "batch=0"),
        (dict(batch=2**40), "cannot be meant"),
        (dict(prompt=-1), "prompt=-1"),
        (dict(generated=1.5), "generated=1.5"),
        (dict(prompt=10**6), "longer than"),
        (dict(weights="int2"), "legal are bf16"),
        (dict(cache="int4"), "legal are bf16, fp8"),
        (dict(chip=None), "give chip="),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = dict(model="llama3.1-8b", chip="h100", prompt=128, generated=16) | changes
    with pytest.raises(ValueError, match="positions=0"):
        serve_plan("llama3.1-8b", **LLAMA).decode(0)
    with pytest.raises(ValueError, match=says):
        serve_plan(arguments.pop("model"), **arguments)
