"""Other calculators beside this planner: theirs as they really answer, and the reasons for the difference."""

import re
from typing import Any

import pytest

from fmlab.models.families import FAMILIES, family_of
from fmlab.parallel import Layout
from fmlab.planner import (
    beside_zero_estimator,
    flops_per_step,
    full_as_causal,
    model_shape,
    plan,
    recompute_as_model,
    six_nd,
    six_nd_off_at,
    slips,
    sparse_as_dense,
    zero_estimate,
)
from fmlab.planner.calculators import BYTES_A_PARAMETER, largest_module
from fmlab.planner.setup import STATES
from fmlab.planner.slips import accumulation_left_out, gb_as_gib

# ---- DeepSpeed's estimator ---------------------------------------------------------------------------------


def test_our_copy_of_the_estimator_answers_as_deepspeed_does() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    for parameters, layer, chips, hosts in (
        (7_500_000_001, 205_930_496, 8, 8),
        (124_439_808, 38_597_376, 1, 1),
    ):
        sizes: dict[str, Any] = dict(chips_per_host=chips, hosts=hosts)
        theirs: dict[str, Any] = dict(num_gpus_per_node=chips, num_nodes=hosts)
        for offload in ("none", "optimizer"):
            host, chip = stage_1_and_2.estimate_zero2_model_states_mem_needs(
                parameters, cpu_offload=offload != "none", **theirs
            )
            assert zero_estimate(parameters, 2, offload=offload, **sizes) == (chip, host)
        for offload in ("none", "optimizer", "parameters"):
            host, chip, _ = stage3.estimate_zero3_model_states_mem_needs(
                parameters,
                layer,
                cpu_offload=offload != "none",
                cpu_offload_params=offload == "parameters",
                **theirs,
            )
            ours = zero_estimate(parameters, 3, largest_layer=layer, offload=offload, **sizes)
            assert ours == (chip, host)


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny", "clip-tiny", "unet-tiny"]
)
def test_the_largest_module_is_the_one_that_deepspeed_finds(name: str) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.stage3 import model_to_params

    model = family_of(name, FAMILIES).from_preset(name)
    assert (model_shape(name).parameters, largest_module(name)) == model_to_params(model)


@pytest.mark.parametrize(("zero", "bytes_each"), [(2, 20), (3, 18)])
def test_the_estimator_counts_more_bytes_a_parameter_and_nothing_but_states(
    zero: int, bytes_each: int
) -> None:
    settings: dict[str, Any] = dict(chip="h100", global_batch=64, seq_len=1024)
    one = plan("gpt2-xl", layout=Layout(data=8, zero=zero), **settings)
    states, everything = beside_zero_estimator(one)
    psi = model_shape("gpt2-xl").parameters
    whole = 2 if zero == 2 else 0  # bytes that no rank divides
    gathered = 4 * 50257 * 1600 if zero == 3 else 0
    assert states.theirs == pytest.approx(psi * (whole + (bytes_each - whole) / 8) + gathered, abs=2)
    assert states.ours == pytest.approx(psi * (whole + (16 - whole) / 8))
    assert 1.1 < states.ratio < 1.3
    assert everything.ours == one.peak_memory
    assert everything.ratio < 0.25  # most of what a chip holds is no state, and does not fall with ranks
    assert "activations" in everything.why
    assert f"{bytes_each} bytes a parameter, here 16" in str(states)


def test_sixteen_eighteen_or_twenty_bytes_a_parameter() -> None:
    totals = {who: sum(items.values()) for who, items in BYTES_A_PARAMETER.items()}
    assert totals == {"ZeRO": 16, "Megatron": 18, "DeepSpeed, ZeRO 3": 18, "DeepSpeed, ZeRO 2": 20}
    assert [STATES[name].total for name in ("mixed-16", "mixed-18")] == [totals["ZeRO"], totals["Megatron"]]


# ---- FLOPs -------------------------------------------------------------------------------------------------


def test_six_nd_is_right_where_attention_is_small_and_wrong_for_long_rows() -> None:
    """GPT-3: 6 N D misses s / 6h = 2.8 % of attention at 2,048 positions, and half of all at 74,000."""
    gpt3 = six_nd("gpt3-175b", 2048)
    assert gpt3.ratio == pytest.approx(0.973, abs=0.001)
    assert six_nd("gpt2", 1024).ratio == pytest.approx(0.874, abs=0.001)
    assert six_nd("llama3.1-8b", 512).ratio == pytest.approx(1.05, abs=0.01)  # a table that is only looked up
    assert six_nd("llama3.1-8b", 131_072).ratio == pytest.approx(0.19, abs=0.01)
    for name in ("gpt2", "gpt3-175b", "llama3.1-8b"):
        for share in (0.1, 0.5):
            off = six_nd_off_at(name, share)
            assert off is not None
            there, before = (six_nd(replaced(name), length).ratio for length in (off, off - 1))
            assert there <= 1 - share < before
    assert six_nd_off_at("gpt3-175b", 0.1) == 8241


def replaced(name: str) -> Any:
    """Without a limit of positions."""
    from dataclasses import replace

    return replace(model_shape(name), positions=0)


def test_an_encoder_and_decoder_pair_is_counted_by_its_own_tokens() -> None:
    one = six_nd("t5-large", {"input": 512, "output": 114})
    assert one.theirs < 6 * model_shape("t5-large").parameters * (512 + 114) * 0.6
    assert 0.8 < one.ratio < 1
    with pytest.raises(ValueError, match="no one length"):
        six_nd_off_at("t5-large", 0.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        six_nd_off_at("gpt2", 10)  # type: ignore[arg-type]


def test_what_is_computed_again_is_no_model_flop() -> None:
    """SC'21's "52 % of the peak" of a 1T model is 96 BsLh^2(...) over it: HFU; its MFU is 39 %."""
    assert recompute_as_model("gpt3-175b", 2048, "full").ratio == pytest.approx(4 / 3, abs=0.005)
    half = recompute_as_model("gpt3-175b", 2048, "selective")
    assert half.ratio == pytest.approx(1 + 2048 / (18 * 12288), abs=0.002)  # one forward pass of three
    assert recompute_as_model("gpt3-175b", 2048, "none").ratio == 1


def test_half_of_the_pairs_hardly_matter_on_short_rows_and_halve_long_ones() -> None:
    assert full_as_causal("llama3.1-8b", 2048).ratio < 1.04
    assert full_as_causal("llama3.1-8b", 131_072).ratio == pytest.approx(1.7, abs=0.05)
    assert full_as_causal("bert-large-uncased", 512).ratio == 1  # no causal attention
    full = flops_per_step(model_shape("llama3.1-8b"), 1, 8192)
    assert full_as_causal("llama3.1-8b", 8192).ours == pytest.approx(full.model - full.attention / 2)


def test_a_sparse_peak_is_refused_or_named() -> None:
    assert sparse_as_dense("a100-80gb").ratio == 2
    assert sparse_as_dense("trn2").ratio == pytest.approx(3.84, abs=0.01)
    assert sparse_as_dense("h100", sparse=1979e12).ratio == pytest.approx(2, abs=0.01)
    with pytest.raises(ValueError, match="give sparse="):
        sparse_as_dense("h100")
    with pytest.raises(ValueError, match="above 0"):
        sparse_as_dense("h100", sparse=-1)


# ---- slips -------------------------------------------------------------------------------------------------


def test_claims_in_circulation_are_off_by_what_we_say() -> None:
    factors = [max(one.ratio, 1 / one.ratio) for one in slips()]
    assert factors == pytest.approx([16.0, 29.96, 23.3, 2.0], rel=0.01)
    assert all(re.search(r"\w+\.\w+/", one.source) for one in slips())
    assert accumulation_left_out(32).ratio == 1 / 32
    assert gb_as_gib(80).ratio == pytest.approx(1.0737, abs=1e-4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: zero_estimate(10**9, 1), "ZeRO 2 and 3"),
        (lambda: zero_estimate(0, 2), "parameters=0"),
        (lambda: zero_estimate(10**9, 2, offload="parameters"), "legal are none, optimizer"),
        (lambda: zero_estimate(10**9, 3, largest_layer=-1), "largest_layer=-1"),
        (lambda: beside_zero_estimator(plan("gpt2", chip="h100", global_batch=1, seq_len=8)), "ZeRO 2 or 3"),
        (lambda: recompute_as_model("gpt2", 8, "some"), "legal are none"),
        (lambda: accumulation_left_out(0), "1 or more"),
    ],
)
def test_what_cannot_be_compared_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
