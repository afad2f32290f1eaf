"""Over the whole space: a plan or a ValueError, nothing else; and memory and time that move as they must."""

from math import isfinite
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fmlab.parallel import Layout
from fmlab.planner import Plan, gpt_shape, llama_shape, model_shape, plan
from fmlab.planner.calibration import Calibration
from fmlab.planner.hardware import hardware

SHAPES = {
    "gpt": gpt_shape(layers=16, hidden=1024, heads=16, vocab=50257, positions=4096),
    "llama": llama_shape(layers=16, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=32000),
    "mixture": llama_shape(
        layers=16, hidden=1024, heads=16, ffn=1024, vocab=32000, experts=16, experts_per_token=2
    ),
    "bert": model_shape("bert-large-uncased"),
    "t5": model_shape("t5-large"),
    "clip": model_shape("clip-vit-l-14"),
    "unet": model_shape("sd-1.5"),
}
MACHINES = {
    name: hardware(name, calibration=Calibration(host_link=25e9, host_memory=20e9))
    for name in ("a100-80gb", "h100", "tpu-v5p", "trn2")
}
QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def asked(draw: st.DrawFn, slip: bool = False) -> dict[str, Any]:
    """Arguments of a plan, mostly legal; with `slip`, one of them may be anything."""

    def one_of(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    name = one_of(*SHAPES)
    schedule, chunks = one_of(("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2))
    pipeline = one_of(1, 2, 4) if schedule == "1f1b" else one_of(2, 4)
    tensor = one_of(1, 2, 4)
    fields: dict[str, Any] = dict(
        data=one_of(1, 2, 8, 16),
        tensor=tensor,
        pipeline=pipeline,
        context=one_of(1, 2) if name in ("gpt", "llama", "bert") else 1,
        micro_batches=pipeline * one_of(1, 2, 8),
        schedule=schedule,
        virtual_stages=chunks,
        zero=draw(st.integers(0, 3)),
        sequence_parallel=tensor > 1 and one_of(True, False),
    )
    if schedule in ("gpipe", "1f1b") and pipeline > 1 and name not in ("clip", "unet"):
        fields["stage_cuts"] = one_of("even", "weighted")
    if fields["zero"] and one_of(True, False):
        fields["offload"] = "parameters" if fields["zero"] == 3 else "optimizer"
    elif fields["data"] > 1 and one_of(True, False):
        fields |= dict(zero=0, fsdp=True, reshard=one_of(True, False))
    fields["expert"] = one_of(1, min(8, fields["data"])) if name == "mixture" else 1
    found = dict(
        model=SHAPES[name],
        machine=MACHINES[one_of(*MACHINES)],
        global_batch=fields["data"] * fields["micro_batches"] * one_of(1, 2, 8),
        seq_len=one_of(1, 64, 77),
        recompute=one_of("none", "selective", "full"),
        attention=one_of("fused", "unfused"),
        states=one_of("mixed-16", "mixed-18", "fp32-16"),
        logits=one_of("chunked", "full"),
        activations=one_of("fmlab", "megatron"),
    )
    if slip and one_of(True, False):
        where = one_of(
            "data", "tensor", "pipeline", "context", "expert", "micro_batches", "global_batch", "seq_len"
        )
        number = one_of(-1, 0, 1, 3, 5, 7, 16, 48, 1000, 2**40, 2.5, "8", None)
        (fields if where in fields else found)[where] = number
    return found | dict(fields=fields)


def made(arguments: dict[str, Any], **changes: Any) -> Plan | None:
    """The plan; None where one is refused with a reason."""
    given_ = dict(arguments)
    try:
        layout = Layout(**(given_.pop("fields") | changes))
        return plan(given_.pop("model"), layout=layout, **given_)
    except ValueError as error:
        said = str(error)
    assert len(said) > 20
    return None


@QUICK
@given(asked(slip=True))
def test_a_plan_or_a_reason(arguments: dict[str, Any]) -> None:
    one = made(arguments)
    assume(one is not None)
    assert one is not None
    lines = [line.value for line in (*one.time.values(), *one.memory.values())]
    assert all(isfinite(value) and value > 0 for value in lines)
    assert 0 < one.mfu <= one.hfu * (1 + 1e-9)
    assert one.mfu < 1.0
    assert one.memory_of(one.fullest_stage).keys() == one.memory.keys()
    totals = [sum(one.memory_of(stage).values()) for stage in range(one.setup.layout.pipeline)]
    assert one.peak_memory == pytest.approx(max(totals))
    assert str(one)
    over = one.memory_over_time()
    assert over.peak.total <= one.peak_memory * (1 + 1e-9)
    assert over.what_peaks in one.memory
    sends = {"tensor messages", "expert messages", "context messages", "pipeline messages", "tied tables"}
    assert one.payloads().keys() - sends <= {"gradient messages", "gathered weights"}


@QUICK
@given(asked())
def test_what_saves_memory_saves_memory(arguments: dict[str, Any]) -> None:
    one = made(arguments)
    assume(one is not None)
    assert one is not None
    layout = one.setup.layout
    for zero in range(layout.zero + 1, 4) if layout.offload == "none" and not layout.fsdp else ():
        other = made(arguments, zero=zero)
        if other is not None and layout.data // layout.expert > 4:
            # what is divided falls; fully sharded, gathered layers come on top
            states = ("weights", "gradients", "masters", "moments")
            assert sum(other.memory[s].value for s in states if s in other.memory) <= sum(
                one.memory[s].value for s in states if s in one.memory
            )
    if arguments["recompute"] == "none":
        again = made(arguments | {"recompute": "full"})
        assert again is not None
        kept = again.memory["activations"].value
        assert kept <= one.memory["activations"].value
        assert again.step_seconds >= one.step_seconds


@QUICK
@given(asked(), st.sampled_from(["inside", "between", "memory", "hidden_gradients", "hidden_tensor"]))
def test_better_hardware_is_never_slower(arguments: dict[str, Any], field: str) -> None:
    one = made(arguments)
    assume(one is not None)
    assert one is not None
    better = hardware(one.machine.chip.name, calibration=one.machine.calibration.changed(**{field: 1.0}))
    other = made(arguments | {"machine": better})
    assert other is not None
    assert other.step_seconds <= one.step_seconds * (1 + 1e-9)


@QUICK
@given(asked())
def test_more_rows_take_longer(arguments: dict[str, Any]) -> None:
    one, two = made(arguments), made(arguments | {"global_batch": 2 * arguments["global_batch"]})
    assume(one is not None and two is not None)
    assert one is not None
    assert two is not None
    assert two.step_seconds >= one.step_seconds
    assert two.peak_memory >= one.peak_memory
    assert two.flops.model == pytest.approx(2 * one.flops.model)


@QUICK
@given(asked(), st.sampled_from(["layers", "hidden", "host_link", "host_memory"]))
def test_larger_models_take_more_and_longer_and_faster_hosts_less(
    arguments: dict[str, Any], what: str
) -> None:
    """A GPT of any layout, with twice the layers, twice the width, or rates of its host twice as high."""
    sizes = dict(layers=16, hidden=1024)
    rates = dict(host_link=25e9, host_memory=20e9)
    more = {name: 2 * number for name, number in (sizes | rates).items() if name == what}
    plans = []
    for change in ({}, more):
        size, rate = ({name: (known | change)[name] for name in known} for known in (sizes, rates))
        shape = gpt_shape(heads=16, vocab=50257, positions=4096, **size)
        machine = hardware("h100", calibration=Calibration(**rate))
        fields = arguments["fields"] | dict(expert=1)
        plans.append(made(arguments | dict(model=shape, machine=machine, fields=fields)))
    assume(None not in plans)
    one, other = plans
    assert one is not None
    assert other is not None
    if what in sizes:
        assert other.peak_memory >= one.peak_memory
        assert other.step_seconds >= one.step_seconds
        assert other.flops.model > one.flops.model
    else:
        assert other.peak_memory == one.peak_memory
        assert other.step_seconds <= one.step_seconds * (1 + 1e-9)
