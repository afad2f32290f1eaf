"""Plans: what they say, what they refuse, how fast they are made."""

import re
from typing import Any

import pytest

from fmlab.chips import Chip
from fmlab.models import GPTConfig
from fmlab.parallel import Layout
from fmlab.planner import gpt_shape
from fmlab.planner.hardware import hardware
from fmlab.planner.plan import Plan, plan
from fmlab.planner.stages import alike

GPT3 = Layout(data=8, tensor=8, pipeline=16, micro_batches=192, sequence_parallel=True)


def gpt3(**changes: Any) -> Plan:
    usual: dict[str, Any] = dict(
        chip="a100-80gb", chips=1024, layout=GPT3, global_batch=1536, seq_len=2048, recompute="selective"
    )
    return plan("gpt3-175b", **(usual | changes))


def test_the_plan_of_the_design() -> None:
    one = gpt3()
    assert (one.chips, one.tokens_per_step, one.fits) == (1024, 1536 * 2048, True)
    assert one.tokens_per_second == pytest.approx(1536 * 2048 / one.step_seconds)
    assert 0.3 < one.mfu <= one.hfu < 0.7
    assert one.flops_by("causal-halved").model < one.flops.model
    assert gpt3(flops_convention="6nd").mfu != one.mfu
    text, page = str(one), one._repr_html_()
    for said in ("modelled", "MFU", "pipeline bubble", "moments", "fits 80.00 GiB", "bound by"):
        assert said in text
        assert said in page or said == "bound by"
    assert "step" in repr(one)
    assert len(repr(one)) < 200


def arithmetic(text: str) -> float:
    """What is left of a text without its words, worked out."""
    tokens = re.findall(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?|(?<= )[-+/x](?= )|[()]", text)
    return float(eval(" ".join(tokens).replace(",", "").replace("x", "*")))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_every_line_can_be_worked_out_again(zero: int) -> None:
    layout = Layout(data=8, tensor=8, pipeline=16, micro_batches=192, zero=zero)
    moe = plan(
        "mixtral-8x7b",
        chip="h100",
        layout=Layout(data=16, expert=8, zero=zero),
        global_batch=64,
        seq_len=4096,
    )
    for one in (gpt3(layout=layout, recompute="full"), moe):
        shown = 0
        assert not one.memory.keys() & one.time.keys()
        for name, line in (one.memory | one.time).items():
            text = one.explain(name)
            assert line.formula in text
            if "\n  = " in text:
                shown += 1
                assert arithmetic(text.split("\n  = ")[1]) == pytest.approx(line.value, rel=1e-4), text
        assert shown >= 9
    with pytest.raises(ValueError, match="has no line 'weight'; it has weights"):
        moe.explain("weight")


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    one = plan("gpt3-6.7b", chip="a100-80gb", layout=Layout(data=8), global_batch=64, seq_len=2048)
    assert one.fits is False
    assert one.lacking == one.peak_memory - 80 * 2**30
    assert "does NOT fit 80.00 GiB" in str(one)
    would = one.what_would_fit()
    assert would
    assert all(other.fits and other.chips == 8 for _, other in would)
    assert would[0][0] in str(one)
    assert gpt3().what_would_fit() == []


def test_a_model_may_be_a_name_a_config_or_a_shape() -> None:
    layout = Layout(data=2)
    config = GPTConfig(50257, 1024, 12, 768, 12)
    shape = gpt_shape(layers=12, hidden=768, heads=12, vocab=50257, positions=1024)
    plans = [
        plan(model, chip="h100", layout=layout, global_batch=8, seq_len=512)
        for model in ("gpt2", config, shape)
    ]
    assert len({one.step_seconds for one in plans}) == 1
    assert len({one.peak_memory for one in plans}) == 1


def test_a_chip_of_your_own() -> None:
    mine = Chip.measured("laptop", {"fp32": 3e11}, memory_bandwidth=2e10, memory_bytes=16 * 2**30)
    one = plan("gpt2-tiny", chip=mine, global_batch=8, seq_len=128, precision="fp32", states="fp32-16")
    assert one.fits
    assert 0 < one.mfu < 1
    with pytest.raises(ValueError, match="how they are wired"):
        plan("gpt2-tiny", chip=mine, layout=Layout(data=2), global_batch=8, seq_len=128, precision="fp32")


FAMILIES = """
gpt2 llama3.1-8b bert-base-uncased roberta-base distilbert-base-uncased t5-base t5-v1.1-base clip-vit-b-32
mixtral-8x7b sd-1.5 dit-xl/2
"""


@pytest.mark.parametrize("name", FAMILIES.split())
def test_every_family_has_a_plan(name: str) -> None:
    seq_len = None if name in ("clip-vit-b-32", "sd-1.5", "dit-xl/2") else 512
    layout = Layout(data=8, tensor=2, micro_batches=2, zero=1)
    one = plan(name, chip="h100", layout=layout, global_batch=32, seq_len=seq_len)
    assert one.fits is (
        name not in ("mixtral-8x7b",)
    )  # whole experts on each rank of an axis that divides none
    assert 0.001 < one.mfu < 0.75
    assert str(one)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(chips=1000), "needs 1024 ranks"),
        (dict(global_batch=1000), "cannot be cut into data x micro_batches = 8 x 192"),
        (dict(global_batch=0), "1 or more"),
        (dict(global_batch=10**12), "cannot be meant"),
        (dict(seq_len=4096), "longer than the 2048 positions"),
        (dict(seq_len=-1), "1 or more"),
        (dict(seq_len="2k"), "whole number"),
        (dict(chip="a100"), "did you mean"),
        (dict(chip="h100", host="p4d.24xlarge"), "has a100-40gb, not h100"),
        (dict(host="p99"), "unknown host"),
        (dict(recompute="some"), "legal are none, selective, full"),
        (dict(precision="fp8"), "no source gives a fp8 rate for a100-80gb"),
        (dict(precision="int8"), "legal are bf16, fp16, fp8"),
        (dict(states="18"), "legal are mixed-16, mixed-18, fp32-16, pure-8"),
        (dict(attention="flash"), "legal are fused, unfused"),
        (dict(logits="none"), "legal are chunked, full"),
        (dict(flops_convention="6ND"), "legal are full-attention"),
        (dict(layout=Layout(data=1024)), "1024 x 1"),
        (
            dict(layout=Layout(data=128, pipeline=8), global_batch=1000),
            "cut into data x micro_batches = 128 x 1",
        ),
        (dict(layout=Layout(data=8, pipeline=128, micro_batches=192)), "legal are 1 to 96"),
        (dict(layout=Layout(data=16, tensor=64)), "tensor=64 cannot divide 96 heads; legal are [1, 2, 3"),
        (dict(layout=Layout(data=1024, expert=8), global_batch=1024), "has no experts to divide"),
        (
            dict(layout=Layout(data=1024, zero=1, offload="optimizer"), global_batch=1024),
            "no source gives the link",
        ),
        (dict(layout="tensor=8"), "give a fmlab.parallel.Layout"),
        (dict(machine=hardware("h100")), "leave the others out"),
        (dict(network_bandwidth=-1.0), "above 0"),
        (dict(network_bandwidth="fast"), "above 0"),
        (dict(calibration=0.5), "give a fmlab.planner.Calibration"),
        (dict(dropout="yes"), "give True or False"),
        (
            dict(layout=Layout(data=1024, recompute="budget", activation_budget=0.5), recompute=None),
            "legal are none, selective, full",
        ),
        (
            dict(layout=Layout(data=256, pipeline=4, micro_batches=6, stage_cuts=(3, 6))),
            "4 chunks need 3 blocks",
        ),
        (dict(layout=Layout(data=256, pipeline=4, micro_batches=6, stage_cuts=(3, 6, 98))), "from 1 to 97"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        gpt3(**change)


def test_contexts_are_for_models_of_tokens() -> None:
    with pytest.raises(ValueError, match="only a model of one stream"):
        plan("t5-base", chip="h100", layout=Layout(context=2), global_batch=2, seq_len=128)
    layout = Layout(context=5, context_method="ulysses")
    with pytest.raises(ValueError, match="ulysses exchanges whole heads"):
        plan("gpt2", chip="h100", layout=layout, global_batch=5, seq_len=1000)
    with pytest.raises(ValueError, match="expert=3 does not divide 8 experts"):
        plan("mixtral-8x7b", chip="h100", layout=Layout(data=3, expert=3), global_batch=3, seq_len=128)


def test_equal_stages_are_asked_once() -> None:
    """A search makes 100,000 plans; how fast they are is a row of `fmlab bench planner`."""
    shape = gpt_shape(layers=128, hidden=25600, heads=160, vocab=51200, positions=2048)
    layout = Layout(data=6, tensor=8, pipeline=64, micro_batches=512)
    one = plan(shape, chip="a100-80gb", layout=layout, global_batch=3072, seq_len=2048)
    assert one.step_seconds > 0
    assert [len(group) for group in alike(shape, layout)] == [1, 62, 1]
    assert sum(key[0] == "stage" for key in shape.memo if isinstance(key, tuple)) == 3
    assert one.memory_of(1)["activations"] > one.memory_of(62)["activations"]
