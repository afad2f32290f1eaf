"""DeepSpeed's ZeRO computes what one device computes, and says what it cannot do."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from fmlab import Ranks
from fmlab.models import BERT, T5, BERTConfig, Llama, LlamaConfig, T5Config
from fmlab.objectives import CausalLM
from fmlab.parallel import Engine, Layout, parallelize, parity
from fmlab.parallel.engines.refusals import refusals
from tests.parallel.common import VOCABULARY, engine, gpt, tokens

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multirank


def llama() -> Llama:
    return Llama(LlamaConfig(VOCABULARY, 24, 3, 16, num_heads=4, num_kv_heads=2, ffn_size=24))


def bert() -> BERT:
    return BERT(BERTConfig(VOCABULARY, 24, 2, 16, num_heads=2, heads="pretraining", dropout=0.0))


def t5() -> T5:
    return T5(T5Config(VOCABULARY, 2, 16, num_heads=2, head_size=8, ffn_size=24, dropout=0.0))


@pytest.mark.parametrize(
    ("model", "layout", "optimizer"),
    [
        (gpt, Layout(data=2, zero=1), "adamw"),
        (gpt, Layout(data=2, zero=2, micro_batches=2), "adamw"),
        (llama, Layout(data=2, zero=3, micro_batches=2), "sgd"),
        (t5, Layout(data=2, zero=3, recompute="full"), "sgd"),
        (bert, Layout(data=2, zero=3, offload="parameters"), "sgd"),
        (gpt, Layout(data=2, zero=2, offload="optimizer"), "adamw"),
    ],
    ids=str,
)
def test_zero_equals_one_device(ranks2: Ranks, model: Any, layout: Layout, optimizer: str) -> None:
    report = parity(model, layout, "deepspeed", optimizer=optimizer, max_grad_norm=0.1, ranks=ranks2)
    report.raise_if_different()


def _all_divided(*args: Any, **kwargs: Any) -> Any:
    from fmlab.parallel.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(*args, keep_gathered=0, **kwargs)


@pytest.mark.parametrize("model", [gpt, t5])
def test_zero_3_of_parameters_that_are_all_divided(ranks2: Ranks, model: Any) -> None:
    """DeepSpeed keeps small parameters whole, and in these models all are small."""
    layout = Layout(data=2, zero=3, micro_batches=2)
    parity(model, layout, _all_divided, max_grad_norm=0.1, ranks=ranks2).raise_if_different()


def test_bf16_and_a_frozen_layer(ranks2: Ranks) -> None:
    def model() -> nn.Module:
        frozen = gpt()
        frozen.blocks[1].requires_grad_(False)
        return frozen

    layout = Layout(data=2, zero=2, precision="bf16")
    parity(model, layout, "deepspeed", ranks=ranks2).raise_if_different()


@pytest.mark.parametrize(
    ("model", "layout"),
    [(llama, Layout(pipeline=2, micro_batches=2)), (t5, Layout(pipeline=2, micro_batches=4))],
    ids=str,
)
def test_its_pipeline_equals_one_device(ranks2: Ranks, model: Any, layout: Layout) -> None:
    report = parity(model, layout, "deepspeed", max_grad_norm=0.1, ranks=ranks2)
    report.raise_if_different()


def test_its_pipeline_with_data_parallelism_and_a_tied_table(ranks4: Ranks) -> None:
    layout = Layout(data=2, pipeline=2, micro_batches=2)
    parity(gpt, layout, "deepspeed", ranks=ranks4).raise_if_different()


def _unscaled(*args: Any, **kwargs: Any) -> Any:
    """Wrong: DeepSpeed's division by the number of ranks is left in."""
    from fmlab.parallel.engines.deepspeed_engine import DeepSpeedEngine

    made = DeepSpeedEngine(*args, **kwargs)
    made._scale = 1
    return made


def test_parity_finds_gradients_that_deepspeed_averaged(ranks2: Ranks) -> None:
    report = parity(gpt, Layout(data=2, zero=2), _unscaled, ranks=ranks2)
    assert "each is 0.50x one device's" in report.diagnosis


def _poisoned(zero: int) -> tuple[bool, bool]:
    made = engine(2, choice="deepspeed", zero=zero)
    batch = tokens(2, [5, 3], seed=dist.get_rank())
    before = {name: p.clone() for name, p in made.full_params().items()}
    with torch.no_grad():
        objective = made.objective
        made.objective = partial(_times_nan, objective)  # type: ignore[assignment]
        made.objective.counts = objective.counts  # type: ignore[attr-defined]
    result = made.step([batch])
    same = all(torch.equal(p, before[name]) for name, p in made.full_params().items())
    return result.skipped and math.isnan(result.grad_norm), same


def _times_nan(objective: Any, model: Any, batch: Any) -> Any:
    from dataclasses import replace

    return {name: replace(term, sum=term.sum * math.nan) for name, term in objective(model, batch).items()}


@pytest.mark.parametrize("zero", [2, 3])
def test_a_step_that_is_not_finite_changes_nothing(ranks2: Ranks, zero: int) -> None:
    assert ranks2.run(_poisoned, zero) == [(True, True)] * 2


def _two_groups(named: Any) -> torch.optim.Optimizer:
    """As training has them: only matrices decay."""
    parameters = [parameter for _, parameter in named]
    matrices, others = ([p for p in parameters if (p.dim() > 1) == matrix] for matrix in (True, False))
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def _grouped(choice: str, zero: int = 0) -> Engine:
    return parallelize(gpt(), Layout(data=2, zero=zero), CausalLM(), _two_groups, choice)


def _save_and_load(folder: str, zero: int) -> bool:
    batch = tokens(4, [3, 12, 7, 1], seed=dist.get_rank())
    torch.manual_seed(0)
    first = _grouped("deepspeed", zero)
    first.step([batch])
    first.save(folder)
    mine = _grouped("fmlab")  # by hand, in whole replicas
    mine.load(folder)
    again = _grouped("deepspeed", zero)
    again.load(folder)
    for other in (first, mine, again):
        other.step([batch])
    wanted = mine.full_params()
    close = [
        torch.allclose(p, wanted[name], atol=1e-6)
        for other in (first, again)
        for name, p in other.full_params().items()
    ]
    return all(close)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_checkpoint_goes_on_in_another_engine(ranks2: Ranks, tmp_path: Path, zero: int) -> None:
    assert all(ranks2.run(_save_and_load, str(tmp_path / "checkpoint"), zero))


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        (Layout(data=2), "zero"),
        (Layout(data=2, fsdp=True), "fsdp"),
        (Layout(data=4, zero=3, replicas=2), "replicas"),
        (Layout(data=2, zero=1, tensor=2), "tensor"),
        (Layout(pipeline=2, micro_batches=2, schedule="gpipe"), "schedule"),
        (Layout(data=2, zero=1, pipeline=2, micro_batches=2), "zero"),
        (Layout(data=2, zero=1, context=2), "context"),
        (Layout(data=2, zero=3, collectives="fmlab"), "collectives"),
    ],
    ids=str,
)
def test_what_deepspeed_cannot_do_is_said_before_any_process_starts(layout: Layout, part: str) -> None:
    assert list(refusals("deepspeed", layout, gpt())) == [part]


def test_deepspeed_has_no_fp64() -> None:
    assert list(refusals("deepspeed", Layout(data=2, zero=1), gpt().double())) == ["fp64"]


def linear_after(zero: int) -> tuple[bool, bool]:
    """Whether torch's linear is itself after a step of an engine that stays open, and whether its own is."""
    before = nn.functional.linear
    one = engine(2, choice="deepspeed", zero=zero, adamw=True)
    one.step([tokens(2, [3, 4])])
    return nn.functional.linear is before, one._linear is before  # type: ignore[attr-defined]


def test_the_linear_of_the_third_stage_stays_in_its_own_steps(ranks2: Ranks) -> None:
    """DeepSpeed replaces torch's for the whole process: other models would keep other tensors."""
    assert ranks2.run(linear_after, 3) == [(True, False)] * 2
    assert ranks2.run(linear_after, 1) == [(True, True)] * 2
