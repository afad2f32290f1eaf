"""Fully sharded training computes what one device computes, sends what formulas say, and holds no more."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fmlab import Ranks
from fmlab.models import State
from fmlab.models.families import family_of
from fmlab.models.gpt import GPTLayer
from fmlab.objectives import Term
from fmlab.objectives.choice import objective_of
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.matrix.models import MODELS
from fmlab.parallel.parity_batches import random_batches
from tests.parallel import common

multirank = pytest.mark.multirank


def equal(ranks: Ranks, build: Any = common.gpt, precision: str = "fp64", **layout: Any) -> Any:
    data = layout.pop("data", ranks.n)
    extra = {k: layout.pop(k) for k in ("optimizer", "max_grad_norm", "batches", "objective") if k in layout}
    report = parity(build, Layout(data=data, fsdp=True, **layout), precision=precision, ranks=ranks, **extra)
    report.raise_if_different()
    return report


# --- the same as one device ---


@multirank
@pytest.mark.parametrize("reshard", [True, False])
def test_gpt_with_accumulation_and_clipping(ranks2: Ranks, reshard: bool) -> None:
    report = equal(ranks2, micro_batches=3, reshard=reshard, max_grad_norm=0.1)
    assert len(report.rows) == len(list(common.gpt().named_parameters()))
    equal(ranks2, partial(common.gpt, tie_embeddings=False), reshard=reshard, optimizer="adamw")


@multirank
@pytest.mark.parametrize("preset", ["bert-tiny", "t5-tiny", "llama-tiny", "mixtral-tiny"])
def test_families_on_four_ranks_some_of_which_hold_no_row(ranks4: Ranks, preset: str) -> None:
    equal(ranks4, partial(family_of(preset).from_preset, preset, vocab_size=131, num_layers=1))


@multirank
def test_fp32_and_models_that_compare_samples_or_denoise(ranks2: Ranks) -> None:
    equal(ranks2, precision="fp32", micro_batches=2)
    equal(ranks2, MODELS["clip"], precision="bf16")
    equal(ranks2, MODELS["unet"])


def alone_in_bf16(name: str) -> bool:
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = random_batches(model, 4, 1, 0)[0]
    results = []
    for fsdp in (False, True):
        engine = parallelize(
            copy.deepcopy(model),
            Layout(fsdp=fsdp, precision="bf16"),
            objective_of(model),
            lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        engine.step([batch])
        results.append({n: t.clone() for n, t in {**engine.full_params(), **engine.full_grads()}.items()})
        engine.close()
    return all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("name", ["gpt", "moe", "t5", "unet"])
def test_gathering_matrices_in_bf16_loses_not_a_bit(name: str) -> None:
    assert alone_in_bf16(name)


@multirank
def test_hybrid_sharding(ranks4: Ranks) -> None:
    equal(ranks4, replicas=2, micro_batches=3, max_grad_norm=0.1)
    equal(ranks4, replicas=4, optimizer="adamw")


class Blocks(nn.Module):
    """Vectors through blocks: one frozen, one of which a part is never used, one that is called twice, one
    that is computed again in the backward pass; and a scale without dims that no block owns."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.again = again
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(common.Branches() for _ in range(4))
        for block in self.blocks:
            block.back = nn.Linear(5, 6)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, branch: Tensor) -> Tensor:
        for i in (0, 1, 2, 3, 2):
            block = self.blocks[i]
            head = block.left if int(branch[:1].sum()) == 0 else block.right
            block.branch = [head]  # hidden from the module's children

            x = checkpoint(block, x, use_reentrant=False) if self.again and i == 3 else block(x)
        return (x[:, :5] * self.scale).square().sum() + 0 * y.sum()


def _forward(self: Any, x: Tensor) -> Tensor:
    def inside(x: Tensor) -> Tensor:
        return x + self.back(self.branch[0](self.stem(x).tanh()))

    return inside(x)


def blocks(again: str = "") -> nn.Module:
    model = Blocks(again)
    for block in model.blocks:
        block.forward = partial(_forward, block)
    return model


class Twice:
    """Calls the model twice, as a loss that compares two passes does."""

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> dict[str, Term]:
        first, second = model(**batch), model(**batch | {"x": 2 * batch["x"]})
        return {"class": Term(sum=first + 0.5 * second, count=self.counts(batch)["class"])}

    def counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"class": torch.tensor(len(batch["y"]))}


@multirank
@pytest.mark.parametrize("again", ["", "around a block"])
def test_frozen_unused_shared_and_recomputed_blocks(ranks4: Ranks, again: str) -> None:
    # one rank takes another branch than the others, one has fewer micro-batches, one has none
    by_rank = [
        [common.rows(3, 0, 1), common.rows(2, 0, 2)],
        [common.rows(4, 1, 3)],
        [],
        [common.rows(1, 0, 4)],
    ]
    for objective in (common.Classify(), Twice()):
        equal(
            ranks4,
            partial(blocks, again),
            batches=[by_rank, by_rank],
            objective=objective,
            optimizer="adamw",
            max_grad_norm=0.5,
        )


class Recomputed(GPTLayer):
    """A layer that keeps nothing but its input."""

    def forward(self, state: State) -> State:
        result: State = checkpoint(super().forward, state, use_reentrant=False)
        return result


def recomputed_gpt() -> nn.Module:
    model = common.gpt()
    for block in model.blocks[1:4]:
        block.__class__ = Recomputed
    return model


@multirank
def test_recompute_inside_a_unit(ranks2: Ranks) -> None:
    equal(ranks2, recomputed_gpt, micro_batches=2)


@multirank
def test_ranks_without_targets_rows_or_micro_batches(ranks4: Ranks) -> None:
    full, masked = common.tokens(2, [12, 5]), common.tokens(2, [0, 0], seed=1)
    no_rows = {name: tensor[:0] for name, tensor in full.items()}
    by_rank = [[full, common.tokens(3, [1, 2, 3], seed=2)], [masked], [no_rows], []]
    assert equal(ranks4, batches=[by_rank]).targets == (23, 0, 0, 0)


@multirank
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt", {"data": 2, "tensor": 2, "micro_batches": 2}),
        ("llama", {"data": 2, "tensor": 2, "sequence_parallel": True}),
        ("gpt", {"data": 2, "pipeline": 2, "micro_batches": 3}),
        ("moe", {"expert": 2, "micro_batches": 2}),
        ("t5", {"recompute": "full", "reshard": False}),
    ],
)
def test_with_other_strategies(ranks4: Ranks, model: str, layout: dict[str, Any]) -> None:
    equal(ranks4, MODELS[model], max_grad_norm=0.1, **layout)


# --- what breaks, and that it is found ---


class AveragedTwice(Composed):
    """Wrong: an averaging reduce on top of losses that were divided by the global count."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> Tensor:
        sums = super()._accumulate(micro_batches, counts)
        for gradient in self.ledger.gradients().values():
            gradient /= self.layout.data
        return sums


class NormOfOwnShards(Composed):
    """Wrong: each rank clips by the norm of its own shards."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        ledger.norm = lambda g: torch.linalg.vector_norm(torch.stack([v.norm() for v in g.values()]))
        return ledger


class RootForgotten(Composed):
    """Wrong: what no block owns keeps this rank's gradient."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        for group in self.states.root.groups:  # type: ignore[attr-defined]
            group.axis.reduce_scatter_into, whole = self._own_part, group.axis
            self.line = whole
        return ledger

    def _own_part(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> None:
        root = self.states.root  # type: ignore[attr-defined]
        if output.numel() == sum(p.chunk for p in root.parameters):
            output.copy_(tensor.view(self.line.size, -1)[self.line.rank])
        else:
            type(self.line).reduce_scatter_into(self.line, output, tensor)


class FirstMicroBatchOnly(Composed):
    """Wrong: the second reduce of a unit overwrites the first, instead of being added."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        for group in self.states.groups:  # type: ignore[attr-defined]
            reduce = group.start_reduce

            def forgetful(group: Any = group, reduce: Any = reduce) -> None:
                group.settle()
                group.sums = None
                reduce()

            group.start_reduce = forgetful
        return ledger


@multirank
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (AveragedTwice, "each is 0.50x one device's"),
        (NormOfOwnShards, "gradient norm: DIFFERS"),
        (RootForgotten, "blocks.0.tokens.weight"),
        (FirstMicroBatchOnly, "DIFFER"),
    ],
)
def test_broken_sharding_is_found(ranks2: Ranks, broken: type[Composed], message: str) -> None:
    layout = Layout(data=2, fsdp=True, micro_batches=2)
    clip = 0.1 if broken is NormOfOwnShards else None
    report = parity(common.gpt, layout, broken, max_grad_norm=clip, ranks=ranks2)
    assert not report.ok
    assert message in str(report), str(report)
    if broken is RootForgotten:
        assert [row.name for row in report.different if row.gradient.error > 1e-3] == [
            "blocks.0.tokens.weight"
        ]
