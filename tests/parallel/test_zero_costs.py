"""What ZeRO stores where, and what it sends: measured, and by the formulas."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fmlab import Ranks
from fmlab.meter import peak_memory, saved_activations, traffic
from fmlab.models.families import family_of
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.ddp import Timeline, ring_bytes
from fmlab.parallel.zero import K, held_bytes, sent_bytes, state_bytes
from fmlab.train import adamw
from tests.parallel import common

STAGES = (1, 2, 3)
multirank = pytest.mark.multirank

# ---- what is stored where ------------------------------------------------------------------------------


def test_the_figure_of_the_paper() -> None:
    totals = [state_bytes(7_500_000_000, 64, stage).total / 1e9 for stage in range(4)]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]
    assert state_bytes(1, 1, 3, gradient_bytes=4).total == 18
    with pytest.raises(ValueError, match="legal are 0, 1, 2, 3"):
        state_bytes(1, 1, 4)


def small_gpt() -> nn.Module:
    return family_of("gpt2-tiny").from_preset("gpt2-tiny", vocab_size=509, num_layers=2)


def hold(dtype: torch.dtype, **layout: Any) -> tuple[int, Any]:
    """(parameters of the model, what a rank holds of its states after a step)."""
    model = small_gpt().to(dtype)
    count = sum(p.numel() for p in model.parameters())
    engine = parallelize(model, Layout(**layout), CausalLM(), adamw(1e-3))
    engine.step([common.tokens(2, [12, 5], seed=dist.get_rank())])
    held = held_bytes(engine)
    engine.close()
    return count, held


@multirank
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_states_hold_what_the_formula_says(ranks4: Ranks, stage: int) -> None:
    for dtype, k, p in ((torch.float32, K["adam fp32"], 4), (torch.bfloat16, K["adam mixed"], 2)):
        if stage == 0 and p == 2:
            continue  # plain data parallelism has no masters
        for count, held in ranks4.run(hold, dtype, data=4, zero=stage):
            # our gradients add up in fp32: 16 bytes in fp32, 18 in bf16
            formula = state_bytes(count, 4, stage, k=k, parameter_bytes=p, gradient_bytes=4)
            for line in ("parameters", "gradients", "optimizer"):
                assert getattr(held.device, line) == pytest.approx(getattr(formula, line), rel=0.02), line
            assert held.host.total == 0


@multirank
def test_offload_moves_the_states_of_the_rank_to_the_host(ranks2: Ranks) -> None:
    for offload, on_device in (("optimizer", 1 / 2), ("parameters", 0)):
        count, held = ranks2.run(hold, torch.float32, data=2, zero=3, offload=offload)[0]
        assert held.device.total == pytest.approx(4 * count * on_device, rel=0.02)
        assert held.host.total == pytest.approx((4 + 4 + 8) * count / 2, rel=0.02)


def masters() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage in STAGES:
        torch.manual_seed(0)
        engine = parallelize(
            small_gpt().bfloat16(), Layout(data=2, zero=stage), CausalLM(), adamw(1e-4), max_grad_norm=1.0
        )
        for _ in range(3):
            engine.step([common.tokens(2, [12, 5], seed=dist.get_rank())])
        states = [value for s in engine.optimizer.state.values() for value in s.values()]
        results[f"dtypes {stage}"] = {t.dtype for t in states if t.dim()} | {
            p.dtype for _, p in engine.ledger.parameters()
        }
        results[f"weights {stage}"] = engine.full_params()
        with torch.no_grad():
            results[f"logits {stage}"] = engine.model(common.tokens(1, [5])["input_ids"]).logits
        engine.close()
    return results


@multirank
def test_bf16_parameters_have_masters_and_moments_in_fp32(ranks2: Ranks) -> None:
    found = ranks2.run(masters)[0]
    for stage in STAGES:
        assert found[f"dtypes {stage}"] == {torch.float32}
        assert found[f"logits {stage}"].dtype == torch.bfloat16
        # the sums are the same, so the stages are too: an update of 1e-4 is lost in bf16, not in the masters
        assert torch.equal(found["logits 1"], found[f"logits {stage}"])
        for name, weight in found["weights 1"].items():
            assert torch.allclose(weight, found[f"weights {stage}"][name], rtol=1e-5, atol=1e-7), name


def parameters_alive() -> tuple[int, int, int]:
    """(bytes of all parameters, of the largest block, the most that a step has alive beyond its
    gradients)."""
    model = family_of("gpt2-tiny").from_preset(
        "gpt2-tiny", vocab_size=64, num_layers=12, tie_embeddings=False
    )
    blocks = [sum(4 * p.numel() for p in block.parameters()) for block in model.blocks]
    engine = parallelize(model, Layout(data=2, zero=3), CausalLM(), adamw(1e-3))
    batch = {name: t % 64 for name, t in common.tokens(1, [3], length=3).items()}
    engine.step([batch])
    with peak_memory() as memory:
        engine.step([batch])
    engine.close()
    return sum(blocks), max(blocks), memory.peak


@multirank
def test_stage_3_has_a_few_blocks_whole_at_a_time(ranks2: Ranks) -> None:
    everything, block, peak = ranks2.run(parameters_alive)[0]
    # Half of the gradients stays. Beyond it: two blocks gathered, one's gradients twice, one under way.
    assert peak < everything / 2 + 6 * block < everything


def kept_and_gathered() -> dict[str, tuple[int, int]]:
    """(bytes that autograd saves, payload of all-gathers) in a step of a stage and a precision."""
    found = {}
    for stage, precision in ((2, "fp32"), (3, "fp32"), (3, "bf16")):
        model = small_gpt()
        engine = parallelize(model, Layout(data=2, zero=stage, precision=precision), CausalLM(), adamw(1e-3))
        batch = common.tokens(2, [12, 9])
        engine.step([batch])
        with saved_activations(model) as saved, traffic() as sent:
            engine.step([batch])
        found[f"{stage} {precision}"] = saved.peak, sent.bytes("all_gather")
        engine.close()
        with torch.no_grad():  # the model has its parameters again, not rounded
            assert model(batch["input_ids"]).logits.dtype == torch.float32
    return found


@multirank
def test_autograd_keeps_no_weights_in_stage_3(ranks2: Ranks) -> None:
    found = ranks2.run(kept_and_gathered)[0]
    assert found["3 fp32"][0] == found["2 fp32"][0]  # activations, and nothing else
    assert found["3 bf16"][0] < found["3 fp32"][0]  # no 16-bit copies of matrices either
    assert found["3 bf16"][1] < 0.8 * found["3 fp32"][1]  # which are sent rounded


@multirank
def test_device_memory_of_a_simulated_chip(ranks2: Ranks) -> None:
    found = ranks2.run(on_chip)[0]
    assert found["ok"]
    p = found["bytes"]
    assert found["none"] == pytest.approx(p / 2 * 4, rel=0.03)  # weights, gradients, two moments
    assert found["optimizer"] == pytest.approx(p / 2, rel=0.03)
    assert found["parameters"] < 0.03 * p


def on_chip() -> dict[str, Any]:
    from fmlab.backends import get_backend

    backend = get_backend("sim:h100")
    found: dict[str, Any] = {"ok": True}
    for offload in ("none", "optimizer", "parameters"):
        report = parity(
            common.gpt, Layout(data=2, zero=3, offload=offload), backend="sim:h100", max_grad_norm=0.1
        )
        found["ok"] = found["ok"] and report.ok
        before = backend.memory_stats()["current"]
        model = small_gpt()
        found["bytes"] = sum(4 * q.numel() for q in model.parameters())
        layout = Layout(data=2, zero=3, offload=offload)
        engine = parallelize(model, layout, CausalLM(), adamw(1e-3), backend=backend)
        del model
        engine.step([common.tokens(2, [12, 5])])
        found[offload] = backend.memory_stats()["current"] - before
        engine.close()
        del engine
    return found


# ---- what is sent --------------------------------------------------------------------------------------


def send(stage: int, micro_batches: int, **layout: Any) -> dict[str, Any]:
    model = common.gpt(tie_embeddings=False)
    count = sum(p.numel() for p in model.parameters())
    made = Layout(data=4, zero=stage, micro_batches=micro_batches, **layout)
    engine = parallelize(model, made, CausalLM(), adamw(1e-3))
    batches = [common.tokens(2, [12, 5], seed=dist.get_rank())] * micro_batches
    engine.step(batches)
    with traffic() as sent:
        engine.step(batches)
    timeline = Timeline()
    if stage < 3:
        engine.states.reducer.timeline = timeline  # type: ignore[attr-defined]
        engine.step(batches)
    engine.close()
    ops = ("reduce_scatter", "all_gather", "all_reduce")
    return {
        "parameters": count,
        "early": timeline.sent_before_last_gradient if timeline.events else 0,
        **{op: sum(c.bytes for c in sent.calls if c.op == op and c.bytes > 2000) for op in ops},
    }


@multirank
@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 3), (2, 1), (3, 1), (3, 3)])
def test_traffic_is_what_the_formula_says(ranks4: Ranks, stage: int, micro_batches: int) -> None:
    found = ranks4.run(send, stage, micro_batches, bucket_mb=0.01)[1]
    formula = sent_bytes(found["parameters"], 4, stage, micro_batches)
    for op in ("reduce_scatter", "all_gather"):
        assert ring_bytes(op, found[op], 4) == pytest.approx(formula[op], rel=0.01)
    assert found["all_reduce"] == 0  # beside a few numbers
    times = {1: 2, 2: 2, 3: 3 * micro_batches}[stage]
    assert formula["total"] == times * 3 / 4 * 4 * found["parameters"]
    if stage < 3:
        assert found["early"] > 3  # sent while the backward pass goes on


@multirank
def test_copies_of_the_states_add_up_slices_only(ranks4: Ranks) -> None:
    found = ranks4.run(send, 2, 1, replicas=2)[0]
    assert found["all_reduce"] == pytest.approx(4 * found["parameters"] / 2, rel=0.01)
