"""What a rank holds: by published figures, by what our blocks keep, and by what engines hold on two ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fmlab import Ranks
from fmlab.meter import saved_activations
from fmlab.models.families import FAMILIES, family_of
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize
from fmlab.parallel.activations import classic
from fmlab.parallel.zero import held_bytes
from fmlab.planner import gpt_shape, model_shape
from fmlab.planner.activations import kept_bytes, published
from fmlab.planner.calibration import Calibration
from fmlab.planner.memory import stage_memory, state_lines
from fmlab.planner.parts import Embedding, Head, LayerGroup
from fmlab.planner.setup import STATES, Setup
from fmlab.planner.stages import cut, edge_bytes, in_flight, parameters_of, parts_of_stage, weighted_cuts
from fmlab.sim.schedule import most_in_flight, schedule
from fmlab.train import adamw
from tests.parallel import common

multirank = pytest.mark.multirank


def setup(name: str, seq_len: Any, rows: int = 2, layout: Layout | None = None, **settings: Any) -> Setup:
    shape = model_shape(name) if isinstance(name, str) else name
    return Setup(shape, layout or Layout(), rows, shape.lengths(seq_len), **settings)


# ---- states ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_figure_of_zero(zero: int, gigabytes: float) -> None:
    lines = state_lines(setup("gpt2", 8, layout=Layout(data=64, zero=zero)), 7.5e9, 0)
    assert sum(lines.values()) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_bytes_of_a_parameter_are_named() -> None:
    assert [STATES[name].total for name in ("mixed-16", "mixed-18", "fp32-16", "pure-8")] == [16, 18, 16, 8]
    lines = state_lines(setup("gpt2", 8, states=STATES["mixed-18"]), 1e9, 0)
    assert lines == {"weights": 2e9, "gradients": 4e9, "masters": 4e9, "moments": 8e9}


def test_experts_are_divided_by_expert_ranks_and_what_is_left_by_the_others() -> None:
    shape = model_shape("mixtral-8x7b")
    one = setup(shape, 64, layout=Layout(data=16, expert=8, zero=3))
    dense, experts = parameters_of(one, parts_of_stage(shape, one.layout, 0))
    assert experts * 8 == 32 * 8 * 3 * 4096 * 14336
    assert dense + 8 * experts == shape.parameters
    assert state_lines(one, dense, experts)["weights"] == 2 * (dense / 16 + experts / 2)


def held(zero: int) -> tuple[float, float, float]:
    torch.manual_seed(0)
    model = family_of("gpt2-tiny").from_preset("gpt2-tiny", vocab_size=509, num_layers=2)
    engine = parallelize(model, Layout(data=2, zero=zero), CausalLM(), adamw(1e-3))
    engine.step([common.tokens(2, [12, 5], seed=dist.get_rank())])
    found = held_bytes(engine).device
    engine.close()
    return found.parameters, found.gradients, found.optimizer


@multirank
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_what_an_engine_holds(ranks2: Ranks, zero: int) -> None:
    shape = model_shape("gpt2-tiny", vocab_size=509, num_layers=2)
    one = setup(shape, 12, layout=Layout(data=2, zero=zero), states=STATES["fp32-16"], precision="fp32")
    lines = state_lines(one, *parameters_of(one, parts_of_stage(shape, one.layout, 0)))
    for weights, gradients, optimizer in ranks2.run(held, zero):
        assert weights == pytest.approx(lines["weights"], rel=0.02)
        assert gradients == pytest.approx(lines["gradients"], rel=0.02)
        assert optimizer == pytest.approx(lines["moments"], rel=0.02)


# ---- activations -------------------------------------------------------------------------------------------


def kept_by(name: str, batch: dict[str, Any], **config: Any) -> list[int]:
    """Bytes that each block of a model keeps, beside what those before it keep."""
    torch.manual_seed(0)
    model: Any = family_of(name, FAMILIES).from_preset(name, **config)
    state, found = model.prepare(**batch), []
    with saved_activations(model) as record:
        for block in model.blocks:
            before = record.live
            state = block(state)
            found.append(record.live - before)
    return found


IDS = torch.arange(64).view(2, 32) + 5
PICTURE = dict(sample=torch.zeros(2, 3, 32, 32), timestep=torch.tensor([1, 2]))
FP32: dict[str, Any] = dict(precision="fp32", states=STATES["fp32-16"])


@pytest.mark.parametrize(
    ("name", "batch", "seq_len"),
    [
        ("gpt2-tiny", dict(input_ids=IDS), 32),
        ("llama-tiny", dict(input_ids=IDS), 32),
        ("bert-tiny", dict(input_ids=IDS), 32),
        ("t5-tiny", dict(input_ids=IDS, decoder_input_ids=IDS[:, :24]), {"input": 32, "output": 24}),
        ("t5-v1.1-small", dict(input_ids=IDS, decoder_input_ids=IDS[:, :24]), {"input": 32, "output": 24}),
        ("mixtral-tiny", dict(input_ids=IDS), 32),
        ("clip-tiny", dict(input_ids=IDS[:, :16] * 0 + 3, pixel_values=PICTURE["sample"]), 16),
        ("unet-tiny", PICTURE | dict(encoder_hidden_states=torch.zeros(2, 11, 128)), 11),
    ],
)
def test_layers_of_every_family_keep_what_the_formula_says(
    name: str, batch: dict[str, Any], seq_len: Any
) -> None:
    """All blocks but tables and heads together. What all layers share (masks, rotations) is left out."""
    small = dict(num_layers=2, vocab_size=100) if name == "t5-v1.1-small" else {}
    shape = model_shape(name, **small)
    one = setup(shape, seq_len, **FP32)
    blocks = kept_by(name, batch, **small)
    layers = [part for part in shape.parts if not isinstance(part, Embedding | Head)]
    ends = len(layers) if "unet" in name else 0
    inner = blocks if ends else blocks[1:-1]
    expected = sum(part.count * kept_bytes(part, one) for part in layers)
    assert sum(inner) == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(("tensor", "sequence_parallel"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_published_table(tensor: int, recompute: str, sequence_parallel: bool) -> None:
    shape = model_shape("gpt3-175b")
    layout = Layout(tensor=tensor, sequence_parallel=sequence_parallel)
    one = setup(shape, 2048, 1, layout, attention="unfused", activations="megatron", recompute=recompute)
    expected = classic(2048, 1, 12288, 96, tensor, sequence_parallel, recompute)
    assert published(shape.layers[0], one) == pytest.approx(expected)


def test_our_blocks_in_16_bits_are_near_the_published_table() -> None:
    shape = model_shape("gpt3-175b")
    ours = setup(shape, 2048, 1, Layout(tensor=8), attention="unfused", dropout=True)
    theirs = replace(ours, activations="megatron")
    assert kept_bytes(shape.layers[0], ours) == pytest.approx(kept_bytes(shape.layers[0], theirs), rel=0.02)


# ---- stages ------------------------------------------------------------------------------------------------


def test_the_first_stage_holds_as_much_as_the_whole_model() -> None:
    """p micro-batches of L / p layers: Korthikanti et al. 2022, section 4.2.3."""
    shape = gpt_shape(layers=96, hidden=12288, heads=96, vocab=51200, positions=2048)
    layout = Layout(tensor=8, pipeline=8, micro_batches=64, sequence_parallel=True)
    one = setup(shape, 2048, 1, layout, attention="unfused", activations="megatron", recompute="selective")
    lines = stage_memory(one, 0, Calibration())
    layers = 96 * classic(2048, 1, 12288, 96, 8, True, "selective")
    assert lines["activations"] == pytest.approx(layers, rel=0.001)  # and the embedding's
    interleaved = replace(one, layout=replace(layout, schedule="interleaved", virtual_stages=3))
    more = 1 + (8 - 1) / (8 * 3)
    assert stage_memory(interleaved, 0, Calibration())["activations"] == pytest.approx(
        more * layers, rel=0.01
    )
    last = stage_memory(one, 7, Calibration())
    assert last["activations"] < lines["activations"] / 7
    assert "logits" not in last  # a few at a time: a layer's backward pass is the worse moment
    whole = stage_memory(setup("gpt2", 1024, 8, logits="full"), 0, Calibration())
    assert whole["logits"] == 8 * 1024 * 50257 * (2 + 4)
    assert "working memory" not in whole
    assert "logits" not in lines


@pytest.mark.parametrize(
    ("kind", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]
)
def test_passes_in_flight_are_those_of_the_schedule(kind: str, virtual: int) -> None:
    for stages in (2, 3, 4, 7):
        for batches in (1, 2, 4, 7, 12, 28):
            if kind == "interleaved" and batches % stages:
                continue
            layout = Layout(pipeline=stages, micro_batches=batches, schedule=kind, virtual_stages=virtual)
            actions = schedule(kind, stages, batches, virtual)
            assert [in_flight(layout, s) for s in range(stages)] == [most_in_flight(a) for a in actions]


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpt2", 5), ("t5-tiny", 3), ("unet-tiny", 4), ("clip-tiny", 3)]
)
def test_stages_hold_the_blocks_that_a_pipeline_gives_them(name: str, chunks: int) -> None:
    from fmlab.parallel.pipeline.stages import cut_blocks

    with torch.device("meta"):
        model: Any = family_of(name, FAMILIES).from_preset(name)
    shape, layout = model_shape(name), Layout(pipeline=chunks, micro_batches=8)
    one = setup(shape, None if name in ("unet-tiny", "clip-tiny") else 8, layout=layout)
    for stage, blocks in enumerate(cut_blocks(model, model.parallel_plan(), chunks)):
        counted = {id(p): p.numel() for i in blocks for p in model.blocks[i].parameters()}
        assert sum(parameters_of(one, parts_of_stage(shape, layout, stage))) == sum(counted.values())
    with pytest.raises(ValueError, match="legal are 1 to"):
        cut(shape, 1000)


@pytest.mark.parametrize("name", ["gpt2", "llama-tiny", "mixtral-tiny", "bert-base-uncased", "t5-base"])
def test_weighted_cuts_are_those_of_the_pipeline(name: str) -> None:
    from fmlab.parallel.pipeline.stages import cut_blocks

    with torch.device("meta"):
        model: Any = family_of(name, FAMILIES).from_preset(name)
    for chunks in (2, 3, 5):
        ranges = cut_blocks(model, model.parallel_plan(), chunks, "weighted")
        layout = Layout(pipeline=chunks, micro_batches=8, stage_cuts="weighted")
        one = setup(name, 8, layout=layout)
        for stage, blocks in enumerate(ranges):
            counted = {id(p): p.numel() for i in blocks for p in model.blocks[i].parameters()}
            parts = parts_of_stage(one.shape, layout, stage)
            assert sum(parameters_of(one, parts)) == sum(counted.values())
    for pictures in ("clip-tiny", "unet-tiny"):
        with pytest.raises(ValueError, match="has pictures"):
            weighted_cuts(model_shape(pictures), 2)
    with pytest.raises(ValueError, match="legal are 1 to 6"):
        weighted_cuts(model_shape("gpt2-tiny"), 7)


def test_a_stage_is_sent_the_stream_and_what_its_layers_look_at() -> None:
    shape, layout = model_shape("t5-base"), Layout(pipeline=4, micro_batches=4)
    one = setup(shape, {"input": 512, "output": 128}, 1, layout)
    edges = [edge_bytes(one, parts_of_stage(shape, layout, stage)) for stage in range(4)]
    assert edges[1] == 512 * 768 * 2
    assert edges[3] == (512 + 128) * 768 * 2
    unet = model_shape("sd-1.5")  # whose text every stage has for itself
    assert edge_bytes(setup(unet, None, 1, layout), parts_of_stage(unet, layout, 0)) == 4096 * 320 * 2


def test_memory_falls_where_it_must() -> None:
    shape = model_shape("gpt3-175b")
    base = setup(shape, 2048, 1, Layout(data=8, tensor=8, pipeline=4, micro_batches=8))

    def bytes_of(one: Setup) -> float:
        return sum(stage_memory(one, 0, Calibration()).values())

    for change in (dict(zero=1), dict(tensor=16), dict(pipeline=8), dict(sequence_parallel=True)):
        assert bytes_of(replace(base, layout=replace(base.layout, **change))) < bytes_of(base), change
    for again in ("selective", "full"):
        unfused = replace(base, attention="unfused")
        assert bytes_of(replace(unfused, recompute=again)) < bytes_of(unfused)
    states = [replace(base.layout, zero=zero) for zero in (0, 1, 2, 3)]
    totals = [bytes_of(replace(base, layout=layout)) for layout in states]
    assert totals == sorted(totals, reverse=True)
    assert isinstance(shape.layers[0], LayerGroup)
