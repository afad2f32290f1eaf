"""Memory through a step: the same peak as a plan's, and what a meter sees on ranks, pass by pass."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fmlab import Ranks
from fmlab.meter import peak_memory
from fmlab.models.families import FAMILIES, family_of
from fmlab.objectives.choice import objective_of
from fmlab.parallel import Layout, parallelize
from fmlab.planner import Calibration, Plan, plan
from fmlab.planner.cli import main
from fmlab.train import adamw
from tests.planner.test_payloads import LENGTHS, batch_for

multirank = pytest.mark.multirank
PLAIN = Calibration(reserve=0.0, context_bytes=0.0)


def planned(layout: Layout, name: str = "gpt2-tiny", rows: int = 8, **settings: Any) -> Plan:
    """fp32 as our engine trains, without what only a chip's runtime takes."""
    batch = rows * layout.micro_batches * layout.data
    settings = dict(precision="fp32", states="fp32-16", calibration=PLAIN) | settings
    settings |= dict(layout=layout, global_batch=batch, seq_len=LENGTHS.get(name, 128))
    return plan(name, chip="h100", **settings)


def measure(layout: Layout, name: str = "gpt2-tiny", rows: int = 8) -> tuple[int, int]:
    """(the most bytes that a second step makes at once, those that are there before its update)."""
    torch.manual_seed(0)
    model = family_of(name, FAMILIES).from_preset(name)
    engine = parallelize(model, layout, objective_of(model), adamw(1e-3))
    copies = layout.tensor * layout.pipeline * layout.context
    seed = dist.get_rank() // copies if dist.is_initialized() else 0
    generator, batches = torch.Generator().manual_seed(seed), []
    for _ in range(layout.micro_batches):
        ids = torch.randint(5, 4000, (rows, 128), generator=generator)
        batches.append(dict(input_ids=ids, labels=ids))
        if name in LENGTHS:
            two = batch_for(name)
            batches[-1] = {key: torch.cat([value] * (rows // 2)) for key, value in two.items()}
        if name == "bert-tiny":  # of 15 % of the positions, and the sentence
            some = torch.rand(rows, 128, generator=generator) < 0.15
            batches[-1] |= dict(labels=ids.where(some, -100), sentence_labels=ids[:, 0] % 2)
    engine.step(batches)
    update: list[int] = []
    with peak_memory() as found:
        hook = engine.optimizer.register_step_pre_hook(lambda *_: update.append(found.live))
        engine.step(batches)
    hook.remove()
    engine.close()
    return found.peak, update[0]


def beside_states(one: Plan, stage: int = 0) -> tuple[float, float]:
    """(peak, before the update) of the lines that a step makes: not of those that stay."""
    layout, stays = one.setup.layout, {"weights", "moments"}
    if layout.data * layout.context > 1 and one.setup.stage_of_zero < 2:
        stays |= {"gradients", "communication buffers"}  # the buckets are made once
    found = [
        sum(value for line, value in moment.lines.items() if line not in stays)
        for moment in one.memory_over_time(stage).moments
    ]
    return max(found), found[-1]


# ---- beside a meter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "within"),
    [
        ("gpt2-tiny", dict(micro_batches=1), 0.02),
        ("gpt2-tiny", dict(micro_batches=2, recompute="full"), 0.02),
        ("llama-tiny", dict(micro_batches=2), 0.02),
        ("mixtral-tiny", dict(micro_batches=1), 0.02),
        ("bert-tiny", dict(micro_batches=2), 0.08),
        ("clip-tiny", dict(micro_batches=1), 0.02),
        ("unet-tiny", dict(micro_batches=1), 0.06),  # the widest gradients come after some activations went
    ],
)
def test_one_device_peaks_as_measured(name: str, settings: dict[str, Any], within: float) -> None:
    """Also with one micro-batch, where a plan's own peak is higher by the gradients."""
    layout = Layout(**settings)
    peak, update = measure(layout, name)
    expected, before = beside_states(planned(layout, name))
    assert peak == pytest.approx(expected, rel=within)
    assert update == pytest.approx(before, rel=max(0.03, within))
    whole = sum(line.value for line in planned(layout, name).memory.values())
    states = sum(planned(layout, name).memory[line].value for line in ("weights", "moments"))
    assert peak <= (whole - states) * 1.01


@multirank
@pytest.mark.parametrize(
    "settings",
    [
        dict(data=2, zero=1),
        dict(data=2, zero=2),
        dict(data=2, zero=3),
        dict(data=2, fsdp=True),
        dict(data=2, fsdp=True, reshard=False),
        dict(tensor=2, sequence_parallel=True),
        dict(context=2),
        dict(pipeline=2, micro_batches=4),
        dict(pipeline=2, micro_batches=4, schedule="gpipe"),
        dict(pipeline=2, micro_batches=4, schedule="interleaved", virtual_stages=2),
        dict(pipeline=2, micro_batches=4, schedule="zb-h1"),
        dict(pipeline=2, micro_batches=4, schedule="zbv", virtual_stages=2),
    ],
    ids=str,
)
def test_ranks_peak_as_measured(ranks2: Ranks, settings: dict[str, Any]) -> None:
    """Every strategy and schedule, every stage: within 6 %."""
    layout = Layout(**settings)
    one = planned(layout)
    for rank, (peak, _) in enumerate(ranks2.run(measure, layout)):
        expected, _ = beside_states(one, rank if layout.pipeline > 1 else 0)
        assert peak == pytest.approx(expected, rel=0.06)


# ---- by itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)]
)
def test_the_peak_is_the_plans_where_gradients_are_there(schedule: str, chunks: int) -> None:
    """A plan adds each line's own maximum; those of zero-bubble schedules do not quite come together."""
    layout = Layout(pipeline=4, micro_batches=12, schedule=schedule, virtual_stages=chunks)
    one = planned(layout, "gpt2", 1, states="mixed-16", precision="bf16")
    for stage in range(4):
        whole = sum(one.memory_of(stage).values())
        peak = one.memory_over_time(stage).peak
        assert peak.total <= whole * (1 + 1e-9)
        slack = 0.25 if schedule in ("zb-h1", "zbv", "gpipe") else 0.001
        assert peak.total >= whole * (1 - slack)


def test_a_step_begins_and_ends_with_states_and_says_what_peaks() -> None:
    layout = Layout(pipeline=4, micro_batches=64)
    over = planned(layout, "gpt2", 4).memory_over_time(0)
    first, last = over.moments[0], over.moments[-1]
    assert first.name == "forward of micro-batch 0"
    assert first.passes == 1
    assert last.name == "update"
    assert last.passes == 0
    assert "activations" not in last.lines
    assert over.what_peaks == "activations"
    assert over.peak.passes == 4
    assert over.repeated == 64 - 8
    assert max(over.series()) == over.peak.total
    assert over.series("activations")[0] * 4 == max(over.series("activations"))
    assert "<- peak" in str(over)
    with pytest.raises(ValueError, match="no moment has a line 'time'"):
        over.series("time")
    with pytest.raises(ValueError, match="legal are 0 to 3"):
        planned(layout).memory_over_time(4)


def test_it_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    command = "gpt2 --chip h100 --pipeline 4 --micro-batches 8 --seq-len 1024 --over-time"
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    assert "memory over time, stage 0: highest" in text
    assert text.count("<- peak") == 1
