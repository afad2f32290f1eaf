"""What breaks a pipeline is found, what its stages must agree on is checked, and its steps are recorded."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmlab import Ranks
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.sim.schedule import most_in_flight, schedule
from tests.parallel import common
from tests.parallel.test_pipeline import gpt, layout

multirank = pytest.mark.multirank

# ---- what breaks -------------------------------------------------------------------------------------------


class UntiedHead(Composed):
    """Wrong: first and last stage each keep their own gradient of the table."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        ledger.entries = {name: replace(entry, partial=()) for name, entry in ledger.entries.items()}
        return ledger


class ScaledByItsOwnCount(Composed):
    """Wrong: one stage takes the mean over its micro-batches of what was divided by the global count."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> Tensor:
        sums = super()._accumulate(micro_batches, counts)
        if self.stages.rank == 1:
            for gradient in self.ledger.gradients().values():
                gradient /= len(micro_batches)
        return sums


class LosesOne(Composed):
    """Wrong: the last micro-batch is never run."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> Tensor:
        return super()._accumulate(micro_batches[:-1], counts)


class CountsTheTableTwice(Composed):
    """Wrong: the norm takes the table of both stages."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        ledger.counts = lambda name: True
        return ledger


@multirank
def test_common_mistakes_are_found(ranks2: Ranks) -> None:
    def run(broken: type[Composed]) -> Any:
        report = parity(common.gpt, layout(), broken, ranks=ranks2, steps=1, precision="fp64")
        assert not report.ok
        return report

    table = "blocks.0.tokens.weight"
    assert [row.name for row in run(UntiedHead).different] == [table]
    scaled = run(ScaledByItsOwnCount)
    assert all(row.gradient.factor == pytest.approx(0.25) for row in scaled.different if row.name != table)
    assert len(scaled.different) < len(scaled.rows)
    lost = run(LosesOne)
    assert lost.loss.factor < 1
    assert len(lost.different) == len(lost.rows)
    twice = run(CountsTheTableTwice)
    assert not twice.different
    assert twice.grad_norm.factor > 1


def engine_on(layout: Layout, model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return parallelize(
        gpt(3) if model is None else model,
        layout,
        CausalLM(),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )


def step_on_other_data(case: str) -> str:
    engine = engine_on(layout("1f1b", 2))
    batches = [common.tokens(2, [5, 5]), common.tokens(2, [5, 5], seed=1)]
    if dist.get_rank() == 1:
        others = {
            "fewer": batches[:1],
            "shorter": [batches[0], common.tokens(2, [5, 5], seed=1, length=9)],
            "others": [batches[0], common.tokens(2, [5, 5], seed=2)],
        }
        batches = others.get(case, batches)
    try:
        engine.step(batches)
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


@multirank
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("fewer", r"stage by stage there are \[2, 1\] with targets"),
        ("shorter", r"micro-batch 1 is .*\(2, 12\).* on stage 0 and .*\(2, 9\).* on stage 1"),
        ("others", "their tensors hold different values"),
        ("same", "no error"),
    ],
)
def test_stages_with_other_data_are_told_so_and_do_not_hang(ranks2: Ranks, case: str, why: str) -> None:
    answers = ranks2.run(step_on_other_data, case)
    assert all(re.search(why, answer) for answer in answers), answers


# ---- what ran, and what was held ---------------------------------------------------------------------------


def recorded(kind: str, micro_batches: int) -> Any:
    engine = engine_on(layout(kind, micro_batches))
    batches = [common.tokens(2, [5, 5], seed=i) for i in range(micro_batches)]
    engine.step(batches)
    engine.pipeline.record_next_step()
    engine.step(batches)
    trace = engine.pipeline.trace()
    engine.step(batches)  # no record of this one
    most = engine.pipeline.most_in_flight
    engine.close()
    return trace, most


@multirank
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zbv"])
def test_a_recorded_step_is_the_schedule_and_counts_what_is_held(ranks2: Ranks, kind: str) -> None:
    (trace, most_0), (_, most_1) = ranks2.run(recorded, kind, 6)
    plan = schedule(kind, 2, 6, 2 if kind == "zbv" else 1)
    assert trace.order() == plan
    assert (
        [most_0, most_1]
        == [stage.most_in_flight for stage in trace.stages]
        == list(map(most_in_flight, plan))
    )
    assert 0 <= trace.bubble < 1
    for stage in trace.stages:
        assert all(a.end <= b.start for a, b in pairwise(stage.passes))
        assert stage.passes[-1].held == 0
        assert stage.most_held > 0
    first = trace.stages[0]
    if kind == "gpipe":  # the bytes of one micro-batch, six times
        assert first.most_held == pytest.approx(6 * first.passes[0].held, rel=0.02)
    if kind == "1f1b":  # two: that of the second comes before the gradient of the first
        assert first.most_held == pytest.approx(2 * first.passes[0].held, rel=0.02)


# ---- checkpoints -------------------------------------------------------------------------------------------


def saved_and_loaded(folder: str) -> list[float]:
    batches = [common.tokens(2, [5, 9], seed=i) for i in range(2)]
    engine = engine_on(layout("1f1b", 2))
    engine.step(batches)
    engine.save(folder)
    losses = [engine.step(batches).loss]
    engine.close()
    for other in (layout("zbv", 2), Layout(data=2)):
        engine = engine_on(other, gpt(3))
        engine.load(folder)
        mine = batches if other.data == 1 else batches[dist.get_rank() : dist.get_rank() + 1]
        losses.append(engine.step(mine).loss)
        engine.close()
    return losses


@multirank
def test_a_checkpoint_of_a_pipeline_fits_any_layout(ranks2: Ranks, tmp_path: Path) -> None:
    for losses in ranks2.run(saved_and_loaded, str(tmp_path / "saved")):
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
