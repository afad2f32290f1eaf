"""Dry runs against the formulae of the papers: memory, FLOPs, bubbles; and what is refused."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fmlab.chips import Chip, chip, switch
from fmlab.models import Llama
from fmlab.sim.cli import main
from fmlab.sim.dry import dry_run
from fmlab.sim.ledger import state_bytes
from fmlab.sim.program import BlockTrace
from fmlab.sim.published import PUBLISHED, published
from fmlab.sim.recorder import Recorder
from fmlab.sim.report import DryRun
from fmlab.sim.roles import trace
from fmlab.sim.schedule import bubble_formula
from fmlab.sim.split import Split

S, B, H, A, T = 2048, 1, 12288, 96, 8  # GPT-3 175B: positions, rows, width, heads; ranks of a tensor group
SMALL: dict[str, Any] = dict(host="p5.48xlarge", global_batch=32, seq_len=128, config=dict(vocab_size=4096))


def layer(attention: str = "unfused", **split: Any) -> BlockTrace:
    """A layer of GPT-3 175B with dropout, as the papers count it."""
    recorder = Recorder(chip("a100-80gb"))
    program = trace("gpt3-175b", Split(**split), B, S, recorder, attention, num_layers=1, dropout=0.1)
    return next(kind for kind in program.kinds if kind.name == "GPTLayer")


@pytest.mark.parametrize(
    ("split", "attention", "formula"),
    [
        (dict(), "unfused", S * B * H * (34 + 5 * A * S / H)),
        (dict(tensor=T), "unfused", S * B * H * (10 + 24 / T + 5 * A * S / (H * T))),
        (dict(tensor=T, sequence_parallel=True), "unfused", S * B * H / T * (34 + 5 * A * S / H)),
        (dict(tensor=T, recompute="selective"), "unfused", S * B * H * (10 + 24 / T)),
        (dict(tensor=T, sequence_parallel=True, recompute="selective"), "unfused", 34 * S * B * H / T),
        (dict(tensor=T, recompute="full"), "unfused", 2 * S * B * H),
        (dict(tensor=T), "fused", S * B * H * (10 + 24 / T)),
    ],
)
def test_activations_of_a_layer(split: dict[str, Any], attention: str, formula: float) -> None:
    """Korthikanti et al. 2022, arXiv:2205.05198, Table 2; the statistics of the norms are what is over."""
    assert layer(attention, **split).saved == pytest.approx(formula, rel=1e-3)


def test_messages_of_a_layer() -> None:
    whole = S * B * H * 2
    plain = layer(tensor=T)
    assert plain.forward.messages == plain.later.messages == {("all_reduce", whole): 2}
    split = layer(tensor=T, sequence_parallel=True)
    assert split.forward.messages == {("all_gather", whole): 2, ("reduce_scatter", whole): 2}
    # one gather more in the backward pass of each region: its input was kept as a share
    assert split.later.messages == {("all_gather", whole): 4, ("reduce_scatter", whole): 2}
    again = layer(tensor=T, recompute="full").later
    assert again.messages == {("all_reduce", whole): 4}
    assert again.flops == pytest.approx(3 * plain.forward.flops)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_by_zero(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, arXiv:1910.02054, Figure 1: 7.5 billion parameters on 64 replicas."""
    states = state_bytes(7_500_000_000, Split(data=64, zero=zero))
    assert sum(states.values()) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_bytes_a_parameter() -> None:
    assert sum(state_bytes(1, Split()).values()) == 16
    assert sum(state_bytes(1, Split(gradients="fp32")).values()) == 18
    assert sum(state_bytes(1, Split(precision="fp32")).values()) == 16


@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_model_flops_are_those_of_the_formula(attention: str) -> None:
    """Korthikanti et al. 2022, eq. 7; Narayanan et al. 2021 with full recompute (96 for 72)."""
    config = dict(num_layers=4, hidden_size=1024, num_heads=16, vocab_size=5120)
    layers, h, v, batch = 4, 1024, 5120, 2
    shape = dict(chip="a100-80gb", global_batch=batch, seq_len=S, attention=attention, config=config)
    run = dry_run("gpt3-350m", **shape)
    model = 72 * batch * layers * S * h * h * (1 + S / (6 * h) + v / (12 * h * layers))
    assert run.model_flops() == pytest.approx(model, rel=1e-9)
    assert run.model_flops("6ND") == 6 * run.program.parameters * batch * S
    full = dry_run("gpt3-350m", **shape, recompute="full")
    assert full.model_flops() == run.model_flops()
    executed = 96 * batch * layers * S * h * h * (1 + S / (6 * h) + v / (16 * h * layers))
    if attention == "fused":  # its backward pass makes the scores a second time
        executed += 2 * S * S * h * batch * layers
    assert full.hardware_flops == pytest.approx(executed, rel=1e-9)
    assert full.usages[0].recomputing > 0
    if attention == "unfused":
        selective = dry_run("gpt3-350m", **shape, recompute="selective")
        assert selective.model_flops() == run.model_flops()
        assert selective.hardware_flops == pytest.approx(model + 4 * S * S * h * batch * layers, rel=1e-9)
        assert selective.usages[0].recomputing > 0
    with pytest.raises(ValueError, match="full-attention, 6ND"):
        run.utilisation("half")


def test_stages_hold_what_the_schedule_keeps() -> None:
    """Stage s of p keeps min(m, p - s) micro-batches (1F1B); GPipe keeps all."""
    for kind, held in (("1f1b", [4, 3, 2, 1]), ("gpipe", [8] * 4)):
        run = dry_run("gpt2-medium", pipeline=4, micro_batches=8, schedule=kind, **SMALL)
        middle = [run.ledgers[stage].lines["activations"] for stage in (1, 2)]
        one = middle[1] / held[2]
        assert middle[0] == pytest.approx(held[1] * one, rel=0.01)
        for stage in range(4):
            points = run.memory_over_time(stage)
            assert max(size for _, size in points) == run.ledgers[stage].total
            assert points[0][1] == points[-1][1]
            assert [at for at, _ in points] == sorted(at for at, _ in points)


def test_the_bubble_is_near_its_formula() -> None:
    """Layers on an even pipeline; head and embedding make the ends longer, so a little more is lost."""
    run = dry_run("gpt2-medium", pipeline=4, micro_batches=16, **SMALL | dict(config=dict(vocab_size=1024)))
    assert bubble_formula(4, 16) < run.bubble + run.exposed_communication < 1.3 * bubble_formula(4, 16)
    for one in run.usages:
        parts = (one.computing, one.recomputing, one.optimizer, one.communication, one.bubble)
        assert sum(parts) == pytest.approx(run.seconds)


def test_waiting_for_the_first_stage_is_no_communication() -> None:
    """The last stage has a tied table, whose gradients it can only add up once the first one is through."""
    run = dry_run("gpt2-medium", data=2, pipeline=4, micro_batches=4, **SMALL)
    first, last = run.usages[0], run.usages[-1]
    assert last.data < 2 * first.data < 0.2 * run.seconds
    assert len(repr(run)) < 200


LAYOUTS = [
    dict(tensor=2, pipeline=2, data=2, micro_batches=4, zero=1),
    dict(data=8, zero=3, micro_batches=2),
    dict(tensor=2, data=4, micro_batches=4, zero=2, sequence_parallel=True),
    dict(tensor=2, pipeline=2, data=2, micro_batches=4, virtual_stages=2, recompute="full"),
    dict(tensor=2, pipeline=2, data=2, micro_batches=4, axis_order=("pipeline", "data", "tensor")),
]


@pytest.mark.parametrize("split", LAYOUTS)
def test_one_rank_of_a_stage_stands_for_all(split: dict[str, Any]) -> None:
    few, every = (dry_run("gpt2-medium", **SMALL, **split, expand=expand) for expand in (False, True))
    assert len(every.step.ranks) == 8
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    same = [one for one in every.usages if one.rank in few.step.ranks]
    for one, other in zip(few.usages, same, strict=True):
        assert one.communication == pytest.approx(other.communication, rel=1e-6)
        assert one.bubble == pytest.approx(other.bubble, rel=1e-6, abs=1e-9)


def test_the_order_of_axes_says_who_shares_a_host() -> None:
    """16 ranks, tensor innermost (Megatron's order) and data innermost; 8 chips to a host."""
    split = Split(tensor=4, data=2, pipeline=2)
    assert split.tensor_group(0, 1) == (4, 5, 6, 7)
    assert split.data_group(1, 3) == (11, 15)
    layout = ("data", "context", "tensor", "pipeline")
    other = Split(tensor=4, data=2, pipeline=2, axis_order=layout)
    assert other.tensor_group(0, 1) == (1, 3, 5, 7)
    assert other.data_group(1, 3) == (14, 15)
    for one in (split, other):
        assert [one.rank(*one.coordinates(rank)) for rank in range(16)] == list(range(16))
    with pytest.raises(ValueError, match="name each of tensor, data, pipeline once"):
        Split(axis_order=("tensor", "data"))


def test_tensor_groups_across_hosts_are_slow() -> None:
    """A group of 8 with one rank on each of 8 hosts: each all-reduce goes through all adapters, as all groups
    of a host do at once. 2 (n-1)/n payloads leave each chip, at its share of 50 GB/s."""
    step = dict(tensor=8, data=8, micro_batches=2, global_batch=64, seq_len=1024)
    shape: dict[str, Any] = dict(host="p4d.24xlarge", config=dict(num_layers=2, vocab_size=4096), **step)
    near, far = (
        dry_run("gpt3-13b", **shape, axis_order=order)
        for order in (("tensor", "data", "pipeline"), ("data", "tensor", "pipeline"))
    )
    assert far.usages[0].computing == pytest.approx(near.usages[0].computing)
    assert far.usages[0].tensor / near.usages[0].tensor == pytest.approx(300e9 / (50e9 / 8), rel=1e-3)
    assert far.usages[0].data < near.usages[0].data


def test_one_slow_rank_delays_all() -> None:
    shape = SMALL | dict(seq_len=1024)
    even = dry_run("gpt2-medium", **shape, **LAYOUTS[0])
    slow = dry_run("gpt2-medium", **shape, **LAYOUTS[0], slow={7: 1.5})
    assert 1.2 < slow.seconds / even.seconds < 1.5
    waits = {one.rank: one.bubble for one in slow.usages}
    assert waits[7] == min(waits.values())


def test_overlap_and_zero_change_what_is_exposed() -> None:
    def exposed(**split: Any) -> DryRun:
        return dry_run("gpt2-medium", **SMALL | dict(host="p4d.24xlarge", seq_len=1024), data=32, **split)

    plain, divided = exposed(), exposed(zero=3)
    assert divided.usages[0].data > 0
    late = exposed(bucket_mb=10_000)  # one bucket: sent when the backward pass is over
    assert late.usages[0].data > plain.usages[0].data
    assert divided.peak_memory < plain.peak_memory


@pytest.mark.parametrize("model", ["llama-tiny", "t5-tiny"])
def test_other_families(model: str) -> None:
    run = dry_run(model, tensor=2, pipeline=2, micro_batches=2, **SMALL)
    assert run.fits
    assert "computing" in str(run)
    assert run.top_operations(3)[0].seconds > 0


def test_model_flops_of_grouped_attention() -> None:
    """6 x weights of products + 12 x layers x width of all heads x positions, for each token."""
    length, rows = 64, 2
    run = dry_run("llama-tiny", chip="h100", global_batch=rows, seq_len=length)
    config = Llama.from_preset("llama-tiny").config
    assert config.kv_heads < config.num_heads
    norms = (2 * config.num_layers + 1) * config.hidden_size
    tables = config.vocab_size * config.hidden_size * (0 if config.tie_embeddings else 1)
    products = run.program.parameters - norms - tables
    token = 6 * products + 12 * config.num_layers * config.num_heads * config.head_width * length
    assert run.model_flops() == token * rows * length


def test_a_step_that_does_not_fit_names_the_line() -> None:
    run = dry_run("gpt3-13b", chip="a100-40gb", global_batch=1, seq_len=2048)
    assert run.fits is False
    assert run.ledgers[0].largest == "moments"
    assert "does NOT fit 40.00 GiB: the largest line is moments; try zero=1" in str(run)


def test_a_chip_of_ones_own() -> None:
    mine = Chip.measured("mine", {"fp32": 1e12}, memory_bandwidth=1e11, memory_bytes=2**34, how="test")
    wires = switch(2, 1e9, 1e-5)
    run = dry_run(
        "gpt2-tiny", chip=mine, topology=wires, data=2, precision="fp32", global_batch=8, seq_len=64
    )
    assert run.chip.name == "mine"
    assert run.usages[0].data > 0


def test_gpt3_on_1024_chips() -> None:
    run = dry_run(
        "gpt3-175b",
        host="p4de.24xlarge",
        chips=1024,
        tensor=8,
        pipeline=16,
        data=8,
        micro_batches=192,
        global_batch=1536,
        seq_len=2048,
    )
    assert run.fits
    assert run.program.parameters == 174_604_259_328
    assert len(run.program.kinds) == 3
    assert 0.3 < run.utilisation() < 0.9
    assert (
        run.wall_seconds < 60
    )  # measured by `fmlab bench dry-run`; here only that it is no matter of minutes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model="gpt3-174b"), "Did you mean 'gpt3-175b'"),
        (dict(host="p5.49xlarge"), "p5.48xlarge"),
        (dict(host=None), "a host .*or a chip alone"),
        (dict(host=None, chip="h100", data=2), "p5.48xlarge"),
        (dict(host=None, chip="h101"), "h100"),
        (dict(chips=16, data=4), "data=16 would use them all"),
        (dict(data=6), "use 30 or 36 rows"),
        (dict(data=12, global_batch=36), "use 8 or 16"),
        (dict(tensor=3), "legal: 1, 2, 4, 8, 16"),
        (dict(pipeline=32, micro_batches=32), "24 layers; legal: 1 to 24"),
        (dict(pipeline=4, virtual_stages=2, micro_batches=2), "use 4, or schedule='1f1b'"),
        (dict(recompute="selective"), "attention='unfused'"),
        (dict(recompute="some"), "none, selective, full"),
        (dict(zero=1), "divides nothing"),
        (dict(sequence_parallel=True), "divides nothing"),
        (dict(tensor=16, sequence_parallel=True, seq_len=100), "does not divide seq_len=100"),
        (dict(precision="fp8"), "fp32, bf16, fp16"),
        (dict(attention="sparse"), "fused, unfused"),
        (dict(rates="best"), "peak, achievable"),
        (dict(host="tpu-v5p-host", rates="achievable"), "use rates='peak'"),
        (dict(seq_len=-1), "seq_len=-1: give a whole number"),
        (dict(global_batch=0), "global_batch=0: give a whole number"),
        (dict(pipelines=2), "dry_run has no pipelines"),
        (dict(slow={9: 2.0}), "no rank of 0..0"),
        (dict(seq_len=4096), "positions"),
        (dict(data=8, tensor=8, pipeline=16, micro_batches=2000, expand=True, global_batch=16000), "fewer"),
        (dict(model="mixtral-tiny", tensor=2), "experts"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    settings = dict(model="gpt2-medium") | SMALL | change
    model = settings.pop("model")
    with pytest.raises(ValueError, match=message):
        dry_run(model, **settings)


def test_published_steps_are_longer_than_their_model() -> None:
    """A roofline leaves something out, so it is early; how much, docs/simulation.md says for every step."""
    step = published("175B, selective recompute, sequence parallel")
    run, achievable = step.dry_run("peak"), step.dry_run("achievable")
    assert 0.65 < run.seconds / step.seconds < achievable.seconds / step.seconds < 1
    assert run.fits
    model = run.model_flops() / step.seconds / step.chips / 312e12
    assert model == pytest.approx(0.514, abs=0.001)  # the paper's own MFU, from its own step time
    with pytest.raises(ValueError, match="22B, full recompute"):
        published("175B")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["gpt2-tiny", "--global-batch", "4", "--seq-len", "64"]
    path = tmp_path / "step.json"
    assert (
        main([*small, "--host", "p5.48xlarge", "--data", "2", "--trace", str(path), "--operations", "2"]) == 0
    )
    said = capsys.readouterr().out
    assert "fits" in said
    assert "aten::" in said
    assert path.exists()
    assert main(["gpt3-13b", "--chip", "a100-40gb", "--global-batch", "1", "--seq-len", "2048"]) == 1
    with pytest.raises(ValueError, match="data x tensor x pipeline"):
        main([*small, "--host", "p5.48xlarge", "--chips", "16"])


def test_the_documentation_has_every_published_step() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    for step in PUBLISHED:
        assert f"| {step.name} | {step.chips:,} | {step.seconds:.2f} s |" in text


def test_gathers_and_sums_share_their_links() -> None:
    run = dry_run("gpt2-medium", **SMALL | dict(host="p4d.24xlarge"), data=16, zero=3, micro_batches=2)
    tasks = run.replay.tasks
    spans = sorted((run.replay.starts[i], run.replay.ends[i]) for i, task in enumerate(tasks) if task.wires)
    assert {task.name for task in tasks if task.wires} == {"all_gather", "reduce_scatter"}
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
