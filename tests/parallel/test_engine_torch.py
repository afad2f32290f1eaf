"""FSDP2, DTensor, torch's pipelining and ZeroRedundancyOptimizer compute what one device computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fmlab import Ranks
from fmlab.models import BERT, T5, BERTConfig, Llama, LlamaConfig, T5Config
from fmlab.parallel import Layout, parity
from fmlab.parallel.engines.refusals import refusals
from fmlab.parallel.matrix.models import MODELS
from tests.parallel.common import VOCABULARY, Branches, Classify, engine, gpt, rows, tokens

pytestmark = pytest.mark.multirank


def llama() -> Llama:
    """Fewer key/value heads than heads."""
    return Llama(LlamaConfig(VOCABULARY, 24, 3, 16, num_heads=4, num_kv_heads=2, ffn_size=24))


def bert() -> BERT:
    return BERT(BERTConfig(VOCABULARY, 24, 2, 16, num_heads=2, heads="pretraining", dropout=0.0))


def t5() -> T5:
    return T5(T5Config(VOCABULARY, 2, 16, num_heads=2, head_size=8, ffn_size=24, dropout=0.0))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (gpt, Layout(data=2, fsdp=True, micro_batches=2)),
        (t5, Layout(data=2, zero=3, recompute="full")),
        (bert, Layout(data=2, zero=2, recompute="selective")),
        (gpt, Layout(data=2, zero=1)),
        (gpt, Layout(data=2, zero=3, offload="parameters")),
        (llama, Layout(tensor=2, sequence_parallel=True)),
        (t5, Layout(tensor=2)),
        (bert, Layout(tensor=2, sequence_parallel=True)),
        (gpt, Layout(pipeline=2, micro_batches=2, schedule="gpipe")),
        (t5, Layout(pipeline=2, micro_batches=4, schedule="1f1b")),
        (llama, Layout(pipeline=2, micro_batches=4, schedule="interleaved", virtual_stages=2)),
        (gpt, Layout(pipeline=2, micro_batches=4, schedule="zb-h1")),
        (gpt, Layout(pipeline=2, micro_batches=4, schedule="zbv", virtual_stages=2)),
    ],
    ids=str,
)
def test_two_ranks_equal_one_device(ranks2: Ranks, model: Any, layout: Layout) -> None:
    parity(model, layout, "torch", precision="fp64", max_grad_norm=0.1, ranks=ranks2).raise_if_different()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(
            data=2,
            tensor=2,
            fsdp=True,
            sequence_parallel=True,
            axis_order=("data", "tensor", "context", "pipeline"),
        ),
        Layout(data=4, fsdp=True, replicas=2),
        Layout(data=2, tensor=2),
        Layout(data=2, pipeline=2, micro_batches=2, fsdp=True),
        Layout(tensor=2, pipeline=2, micro_batches=2, sequence_parallel=True),
    ],
    ids=str,
)
def test_products_of_two_equal_one_device(ranks4: Ranks, layout: Layout) -> None:
    parity(gpt, layout, "torch", precision="fp64", max_grad_norm=0.1, ranks=ranks4).raise_if_different()


def test_adamw_and_bf16(ranks2: Ranks) -> None:
    layout = Layout(data=2, fsdp=True, micro_batches=2)
    parity(gpt, layout, "torch", precision="fp64", optimizer="adamw", ranks=ranks2).raise_if_different()
    parity(llama, layout, "torch", precision="bf16", ranks=ranks2).raise_if_different()


def test_ranks_that_use_different_parameters(ranks2: Ranks) -> None:
    """FSDP2 by itself would add up the gradient of one rank's branch and that of the other rank's branch."""
    step = [[rows(3, 0, seed=1)], [rows(2, 1, seed=2)]]
    report = parity(
        Branches,
        Layout(data=2, fsdp=True),
        "torch",
        batches=[step, step],
        precision="fp64",
        objective=Classify(),
        ranks=ranks2,
    )
    report.raise_if_different()


def test_frozen_layer_and_a_rank_without_targets(ranks2: Ranks) -> None:
    def model() -> nn.Module:
        frozen = gpt()
        frozen.blocks[1].requires_grad_(False)
        return frozen

    step = [[tokens(2, [5, 12])], [tokens(2, [0, 0])]]
    layout = Layout(data=2, fsdp=True)
    parity(model, layout, "torch", batches=[step], precision="fp64", ranks=ranks2).raise_if_different()


def _averaged(*args: Any, **kwargs: Any) -> Any:
    """FSDP2 as it comes: it averages what is a share of the mean already."""
    from fmlab.parallel.engines import torch_shard
    from fmlab.parallel.engines.torch_engine import TorchEngine

    engine = TorchEngine(*args, **kwargs)
    for module in torch_shard.divided(engine.model):
        module.set_gradient_divide_factor(2.0)
    return engine


def _partial_norms(*args: Any, **kwargs: Any) -> Any:
    """Sequence parallelism without the sum of the norms' gradients."""
    from torch.distributed.tensor import DTensor, Replicate

    from fmlab.parallel.engines.torch_engine import TorchEngine

    engine = TorchEngine(*args, **kwargs)
    finish = engine.states.finish

    def forgetful(sums: Any) -> Any:
        for parameter in engine.ledger.trainable().values():
            g = parameter.grad
            if isinstance(g, DTensor) and any(placed.is_partial() for placed in g.placements):
                parameter.grad = DTensor.from_local(g.to_local(), g.device_mesh, [Replicate()])
        return finish(sums)

    engine.states.finish = forgetful  # type: ignore[method-assign]
    return engine


def _untied(*args: Any, **kwargs: Any) -> Any:
    """A pipeline as torch has it: each stage trains a table of its own."""
    from fmlab.parallel.engines.torch_engine import TorchEngine

    engine = TorchEngine(*args, **kwargs)
    engine.pipeline.tied.axes = {}  # type: ignore[union-attr]
    return engine


@pytest.mark.parametrize(
    ("wrong", "layout", "says"),
    [
        (_averaged, Layout(data=2, fsdp=True), "each is 0.50x one device's"),
        (
            _partial_norms,
            Layout(tensor=2, sequence_parallel=True),
            "gradients differ, first blocks.1.attention_norm",
        ),
        (_untied, Layout(pipeline=2, micro_batches=2), "first blocks.0.tokens.weight, and no other: are all"),
    ],
)
def test_parity_finds_what_breaks(ranks2: Ranks, wrong: Any, layout: Layout, says: str) -> None:
    report = parity(gpt, layout, wrong, precision="fp64", ranks=ranks2)
    assert not report.ok
    assert says in report.diagnosis


def _save_and_load(folder: str) -> bool:
    from torch import distributed as dist

    fsdp = engine(2, choice="torch", adamw=True, fsdp=True)
    torch.manual_seed(dist.get_rank())
    batch = tokens(4, [3, 12, 7, 1], seed=dist.get_rank())
    fsdp.step([batch])
    fsdp.save(folder)
    zero = engine(2, choice="torch", adamw=True, zero=1)
    zero.load(folder)
    same = all(torch.equal(a, zero.full_optimizer_state()[k]) for k, a in fsdp.full_optimizer_state().items())
    fsdp.step([batch])
    zero.step([batch])
    after = zero.full_params()
    return same and all(torch.allclose(a, after[k], atol=1e-6) for k, a in fsdp.full_params().items())


def test_a_checkpoint_moves_between_strategies(ranks2: Ranks, tmp_path: Path) -> None:
    assert all(ranks2.run(_save_and_load, str(tmp_path / "checkpoint")))


@pytest.mark.parametrize(
    ("layout", "model", "part"),
    [
        (Layout(context=2), gpt, "context"),
        (Layout(tensor=4), llama, "tensor"),
        (Layout(tensor=2, sequence_parallel=True), t5, "sequence_parallel"),
        (Layout(data=2, zero=1, tensor=2), gpt, "zero"),
        (Layout(data=2, zero=2, offload="optimizer"), gpt, "offload"),
        (Layout(pipeline=2, micro_batches=2, schedule="zb-h1"), t5, "schedule"),
        (Layout(data=2, zero=3, pipeline=2, micro_batches=2, schedule="zb-h1"), gpt, "schedule"),
        (Layout(pipeline=2, micro_batches=4, schedule="zbv", virtual_stages=2), MODELS["clip"], "schedule"),
        (Layout(pipeline=2, micro_batches=2, schedule="zb-h1"), MODELS["unet"], "schedule"),
        (Layout(tensor=2), MODELS["unet"], "tensor"),
        (Layout(data=2, fsdp=True), MODELS["unet"], "fsdp"),
        (Layout(pipeline=4, micro_batches=2), gpt, "micro_batches"),
        (Layout(data=2, collectives="fmlab", fsdp=True), gpt, "collectives"),
    ],
    ids=str,
)
def test_what_torch_cannot_do_is_said_before_any_process_starts(
    layout: Layout, model: Any, part: str
) -> None:
    with torch.device("meta"):
        found = refusals("torch", layout, model())
    assert list(found) == [part]


def test_a_pipeline_of_micro_batches_that_differ_is_refused_on_every_rank(ranks2: Ranks) -> None:
    step = [[tokens(2, [5, 12]), tokens(2, [5, 8], length=8)]]
    with pytest.raises(Exception, match="all 2 ranks: ValueError: torch's pipeline runs"):
        parity(gpt, Layout(pipeline=2, micro_batches=2), "torch", batches=[step], ranks=ranks2)
