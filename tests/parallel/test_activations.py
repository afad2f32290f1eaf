"""The formula of what a layer keeps, held to what autograd keeps and to the published table."""

from typing import Any

import pytest
import torch
from torch import nn

from fmlab import Ranks
from fmlab.meter import saved_activations
from fmlab.models.dropout import Masks, drawing_masks
from fmlab.models.families import family_of
from fmlab.objectives.choice import objective_of
from fmlab.parallel import Layout, parallelize
from fmlab.parallel.activations import (
    LayerShape,
    Run,
    classic,
    kept,
    layer_shape,
    run_of,
    selective_share,
    total,
)
from fmlab.parallel.composed import Composed

multirank = pytest.mark.multirank
pytestmark = pytest.mark.filterwarnings("ignore:recompute='selective' frees nothing")
ROWS, LENGTH, LAYERS = 3, 33, 2  # an odd length, which two ranks do not divide
WIDE = {"hidden_size": 256}


def model_of(name: str, dropout: float) -> nn.Module:
    config = {"dropout": dropout} if dropout else {}
    model: nn.Module = family_of(name).from_preset(name, num_layers=LAYERS, vocab_size=131, **WIDE, **config)
    return model


def measure(name: str, layout: Layout, dropout: float = 0.0, pure: bool = False) -> tuple[int, int]:
    """Bytes that the layers of a model keep on this rank: measured, and by the formula."""
    model: Any = model_of(name, dropout)
    model = model.bfloat16() if pure else model
    shape, random = layer_shape(model.blocks[1]), dropout > 0
    sizes = {"stream": 2, "product": 2} if pure else {}
    run = run_of(layout, ROWS, LENGTH, dropout=random, tables=random, **sizes)
    engine = parallelize(
        model,
        layout,
        objective_of(model),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        Composed,
    )
    masks = Masks(0, 0) if random else None
    with engine.backend.autocast(layout.precision), drawing_masks(masks):  # type: ignore[arg-type]
        state = model.blocks[0](model.prepare(torch.randint(131, (ROWS, LENGTH))))
        model.blocks[1](state)
        shared = state.derived.get("rotary", ())
        with saved_activations([*model.parameters(), *model.buffers(), *shared]) as record:
            for block in model.blocks[1 : 1 + LAYERS]:
                state = block(state)
    engine.close()
    return record.peak, total(shape, run, LAYERS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("name", "dropout"), [("gpt2-tiny", 0.1), ("llama-tiny", 0.0), ("bert-tiny", 0.1)])
def test_measured_on_one_device(name: str, dropout: float, recompute: str, precision: str) -> None:
    measured, predicted = measure(name, Layout(precision=precision, recompute=recompute), dropout)
    assert measured == pytest.approx(predicted, rel=0.01 if recompute == "full" else 0)


@multirank
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "bert-tiny"])
def test_measured_on_two_ranks(ranks2: Ranks, name: str) -> None:
    dropout = 0.0 if name == "llama-tiny" else 0.1
    for settings in (
        {},
        {"sequence_parallel": True, "precision": "bf16"},
        {"sequence_parallel": True, "recompute": "full"},
    ):
        layout = Layout(tensor=2, **settings)  # type: ignore[arg-type]
        for measured, predicted in ranks2.run(measure, name, layout, dropout):
            assert measured == pytest.approx(predicted, rel=0.02)


def test_in_pure_16_bits_it_is_the_published_table() -> None:
    measured, predicted = measure("gpt2-tiny", Layout(), 0.1, pure=True)
    assert measured == predicted
    s, b, h, a = 2048, 1, 12288, 96  # GPT-3
    layer = LayerShape(h, a, a, h // a, 4 * h)
    for settings in (
        {},
        {"tensor": 8},
        {"tensor": 8, "sequence_parallel": True},
        {"tensor": 8, "sequence_parallel": True, "recompute": "selective"},
        {"recompute": "selective"},
        {"recompute": "full"},
    ):
        run = Run(b, s, 2, 2, dropout=True, tables=True, **settings)  # type: ignore[arg-type]
        t, sequence = run.tensor, run.sequence_parallel
        published = classic(s, b, h, a, t, sequence, run.recompute)
        assert total(layer, run) == pytest.approx(published, rel=0.012)  # the causal table


def test_published_figures() -> None:
    assert classic(2048, 1, 12288, 96) / (2048 * 12288) == 34 + 80  # 5as/h = 80 for 175B parameters
    saved = 1 - classic(2048, 1, 12288, 96, recompute="selective") / classic(2048, 1, 12288, 96)
    assert saved == pytest.approx(0.70, abs=0.005)
    saved = 1 - classic(2048, 1, 20480, 128, recompute="selective") / classic(2048, 1, 20480, 128)
    assert saved == pytest.approx(0.65, abs=0.005)
    assert selective_share(2048, 12288) == pytest.approx(0.027, abs=0.0005)
    assert selective_share(2048, 20480) == pytest.approx(0.016, abs=0.0005)


def test_what_has_no_formula_is_refused() -> None:
    layer = LayerShape(16, 3, 3, 4, 64)
    with pytest.raises(ValueError, match=r"3 heads cannot be divided among 2 ranks; legal are \[1, 3\]"):
        kept(layer, Run(1, 8, tensor=2))
    with pytest.raises(ValueError, match="legal are none, selective, full"):
        Run(1, 8, recompute="budget")
    with pytest.raises(ValueError, match="rows=0: give 1 or more"):
        Run(0, 8)
    with pytest.raises(ValueError, match="no formula for a Linear"):
        layer_shape(nn.Linear(2, 2))
