"""Bad input and faults under every kind of layout: a right result, or an error before anything is sent.

What is refused from shapes alone is in test_legal.py. Pools end a call after a minute, so that a hang fails.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fmlab import RankError, Ranks
from fmlab.parallel import Layout, parity
from tests.parallel import common

pytestmark = pytest.mark.multirank

DIVIDED = {
    "zero1": Layout(data=2, zero=1),
    "zero3": Layout(data=2, zero=3),
    "fsdp": Layout(data=2, fsdp=True),
    "tensor": Layout(tensor=2, sequence_parallel=True),
    "pipeline": Layout(pipeline=2, micro_batches=2),
    "context": Layout(context=2),
}


@pytest.fixture
def proves(ranks2: Ranks) -> Any:
    return partial(_proves, ranks2)


def _proves(ranks: Ranks, model: Any, layout: Layout, batches: Any = None, **settings: Any) -> None:
    report = parity(
        model, layout, batches=batches, precision="fp64", ranks=ranks, max_grad_norm=0.1, **settings
    )
    report.raise_if_different()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_fewer_micro_batches_than_stages(proves: Any, schedule: str) -> None:
    proves(common.gpt, Layout(pipeline=2, schedule=schedule))


@pytest.mark.parametrize("name", list(DIVIDED))
def test_rows_and_lengths_that_change_from_step_to_step(proves: Any, name: str) -> None:
    """Also back to the first shape, of which something may have been kept."""
    shapes = [(8, 12), (4, 7), (8, 12)]
    batches = [
        common.tokens(rows, [1 + i % length for i in range(rows)], seed, length)
        for seed, (rows, length) in enumerate(shapes)
    ]
    proves(common.gpt, DIVIDED[name], batches)


@pytest.mark.parametrize("layout", [DIVIDED["zero1"], DIVIDED["zero3"], DIVIDED["fsdp"]], ids=str)
def test_a_rank_with_an_empty_batch_or_none(proves: Any, layout: Layout) -> None:
    full, masked = common.tokens(2, [12, 5]), common.tokens(2, [0, 0], seed=1)
    no_rows = {name: tensor[:0] for name, tensor in full.items()}
    for other in ([masked], [no_rows], []):
        proves(common.gpt, layout, [[[full, common.tokens(3, [1, 2, 3], seed=2)], other]])


def test_a_pipeline_beside_one_that_has_an_empty_batch(ranks4: Ranks) -> None:
    full, masked = common.tokens(2, [12, 5]), common.tokens(2, [0, 0], seed=1)
    no_rows = {name: tensor[:0] for name, tensor in full.items()}
    for other in ([masked, masked], [no_rows, full]):
        layout = Layout(data=2, pipeline=2, micro_batches=2)
        _proves(ranks4, common.gpt, layout, [[[full, common.tokens(3, [1, 2, 3], seed=2)], other]])


@pytest.mark.parametrize("name", ["zero1", "zero3", "fsdp"])
def test_parameters_that_a_step_or_a_rank_does_not_use_and_a_model_without_a_plan(
    proves: Any, name: str
) -> None:
    """One rank goes left and the other right, and `never` is used by none: no weight decay."""
    by_rank = [[common.rows(3, 0, 1)], [common.rows(4, 1, 3)]]
    settings: Any = dict(objective=common.Classify(), optimizer="adamw")
    proves(common.Branches, DIVIDED[name], [by_rank, by_rank], **settings)


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_a_model_without_a_plan_is_refused_where_one_is_needed(ranks2: Ranks, axis: str) -> None:
    batches = [common.rows(4, 0, 1)]
    with pytest.raises(ValueError, match=rf"{axis}=2 read from the model's parallel plan.*Branches has none"):
        parity(
            common.Branches, Layout(**{axis: 2}), batches=batches, objective=common.Classify(), ranks=ranks2
        )


def frozen() -> nn.Module:
    model = common.gpt()
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", list(DIVIDED))
def test_a_frozen_layer(proves: Any, name: str) -> None:
    proves(frozen, DIVIDED[name])


def frozen_embedding() -> nn.Module:
    """A tied table that does not learn: its two places must stay one."""
    model = common.gpt()
    model.embedding.tokens.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", ["zero3", "tensor", "pipeline"])
def test_a_frozen_tied_table(proves: Any, name: str) -> None:
    proves(frozen_embedding, DIVIDED[name])


def unequal() -> nn.Module:
    """Another shape on one rank, as from a config that was read before it was written everywhere."""
    import torch.distributed as dist

    return nn.Linear(4, 3 + (dist.is_initialized() and dist.get_rank() == 1))


@pytest.mark.parametrize("layout", [Layout(data=2, zero=2), Layout(data=2, fsdp=True)], ids=str)
def test_ranks_with_different_models_are_told_so(ranks2: Ranks, layout: Layout) -> None:
    batches = [{"x": torch.ones(2, 4)}]
    with pytest.raises(RankError, match=r"the ranks hold different models.*\(3, 4\).* \(4, 4\)"):
        parity(unequal, layout, batches=batches, objective=_Sum(), ranks=ranks2)


class _Sum:
    def __call__(self, model: Any, batch: Any) -> Any:
        from fmlab.objectives import Term

        return {"sum": Term(sum=model(batch["x"]).sum(), count=torch.tensor(1))}

    def counts(self, batch: Any) -> Any:
        return {"sum": torch.tensor(1)}
