"""Fully sharded training computes what one device computes, sends what formulas say, and holds no more."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fmlab import RankError, Ranks
from fmlab.meter import peak_memory, traffic
from fmlab.models import State
from fmlab.models.families import family_of
from fmlab.models.gpt import GPTLayer
from fmlab.models.initial import initialise
from fmlab.objectives import CausalLM, Term
from fmlab.objectives.choice import objective_of
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.fsdp import Chunks, cost
from fmlab.parallel.fsdp.units import blocks_of, homes_of
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


# --- what is sent and held ---


def counted(layout: Layout) -> list[dict[str, int]]:
    torch.manual_seed(0)
    engine = parallelize(
        common.gpt(), layout, CausalLM(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )
    rows = common.tokens(4 * layout.micro_batches, [5] * 4 * layout.micro_batches)
    found = []
    for _ in range(2):
        with traffic() as sent:
            engine.step(layout.split(rows, dist.get_rank()))
        found.append({op: sent.bytes(op) for op in ("all_gather", "reduce_scatter", "all_reduce")})
    engine.close()
    return found


@multirank
@pytest.mark.parametrize("replicas", [1, 2])
def test_bytes_sent_are_those_of_the_formula(ranks4: Ranks, replicas: int) -> None:
    model = common.gpt()
    for reshard, micro_batches in ((True, 1), (False, 1), (True, 2)):
        layout = Layout(data=4, fsdp=True, reshard=reshard, replicas=replicas, micro_batches=micro_batches)
        expected = cost.expected_payload(model, layout)
        for steps in ranks4.run(counted, layout):
            for step in steps:
                objects = step["all_gather"] - expected["all_gather"]  # ranks tell how many batches they have
                assert 0 <= objects < 20_000
                assert step["reduce_scatter"] == expected["reduce_scatter"]
                assert step["all_reduce"] == expected["all_reduce"]
    whole = cost.sizes(model, 4 // replicas).total
    ideal = {r: cost.expected_bytes(model, Layout(data=4, fsdp=True, reshard=r)) for r in (True, False)}
    if replicas == 1:
        assert ideal[False] == 2 * whole * 3 / 4  # as DDP
        assert 2 * whole * 3 / 4 < ideal[True] < 3 * whole * 3 / 4


class Wide(nn.Module):
    """Blocks whose parameters are far larger than their activations."""

    def __init__(self, widths: tuple[int, ...] = (300, 500, 400, 200)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Linear(width, 128), nn.Linear(128, 8)) for width in widths
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().sum() + 0 * y.sum()


def peak_of_parameters(prefetch: int, training: bool, bf16: bool) -> tuple[int, int]:
    layout = Layout(data=2, fsdp=True, precision="bf16" if bf16 else "fp32")
    engine = parallelize(
        Wide(), layout, common.Classify(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )
    engine.states.schedule.prefetch = prefetch  # type: ignore[attr-defined]
    batch = {"x": torch.ones(1, 8), "y": torch.zeros(1)}
    shards = sum(p.numel() * 4 for _, p in engine.ledger.parameters())
    with peak_memory() as memory:
        if training:
            engine.step([batch])
        else:
            with torch.no_grad(), engine.backend.autocast(layout.precision):
                engine.model(**batch)
    engine.close()
    return shards, memory.peak


@multirank
@pytest.mark.parametrize("prefetch", [0, 1])
def test_peak_of_parameters(ranks2: Ranks, prefetch: int) -> None:
    unit = cost.sizes(Wide(), 2)
    for shards, peak in ranks2.run(peak_of_parameters, prefetch, False, False):
        assert shards == unit.total / 2
        assert shards + peak == pytest.approx(cost.expected_peak(unit, 2), rel=0.01)
        # the paper's formula, and the copy to where a parameter's rows lie one below the other
        assert shards + peak == pytest.approx(cost.paper_peak(unit, 2) + max(unit.units), rel=0.01)
    for shards, peak in ranks2.run(peak_of_parameters, prefetch, False, True):  # matrices in bfloat16
        assert shards + peak < 1.02 * cost.expected_peak(unit, 2, low=0.5)
    for shards, peak in ranks2.run(peak_of_parameters, prefetch, True, False):
        # beside it: the summed gradients of this rank's rows, and one unit's gradients on their way
        assert shards + peak < 1.02 * (cost.expected_peak(unit, 2) + unit.total / 2 + 2 * max(unit.units))


# --- a model that no rank could hold ---


def filled(seed: int, world: int) -> tuple[dict[str, Tensor], int, int, int]:
    torch.manual_seed(seed + dist.get_rank())  # the first rank's counts
    with torch.device("meta"):
        model = common.gpt()
    with peak_memory() as memory:
        engine = common.engine(world, model, fsdp=True)
    shards = sum(p.numel() * 4 for _, p in engine.ledger.parameters())
    full = {name: p.clone() for name, p in engine.full_params().items()}
    engine.step(Layout(data=world).split(common.tokens(4, [3, 4, 5, 6]), dist.get_rank()))
    engine.close()
    return full, shards, memory.peak, max(4 * p.numel() for p in full.values())


@multirank
def test_a_model_on_the_meta_device_is_filled_shard_by_shard(ranks2: Ranks, ranks4: Ranks) -> None:
    alone = common.gpt()
    initialise(alone, seed=7)
    other = common.gpt()
    initialise(other, seed=8)
    assert not torch.equal(alone.blocks[2].mlp.up.weight, other.blocks[2].mlp.up.weight)
    assert float(alone.blocks[1].attention.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    whole = sum(4 * p.numel() for p in alone.parameters())
    for ranks in (ranks2, ranks4):
        for full, shards, peak, largest in ranks.run(filled, 7, ranks.n):
            assert all(torch.equal(full[name], p) for name, p in alone.named_parameters())
            unit = max(cost.sizes(alone, ranks.n).units)
            assert peak < shards + largest + unit < whole  # never the whole, and close to one parameter's


def meta_without_sharding() -> None:
    with torch.device("meta"):
        model = common.gpt()
    common.engine(dist.get_world_size(), model)


# --- what is refused ---


def thawed() -> None:
    model = common.gpt()
    model.blocks[1].requires_grad_(False)
    engine = common.engine(2, model, fsdp=True)
    for _, parameter in engine.ledger.parameters():
        parameter.requires_grad_(True)
    engine.step(Layout(data=2).split(common.tokens(2, [3, 4]), dist.get_rank()))


def part_of_a_block() -> None:
    engine = common.engine(2, fsdp=True)
    with engine.states.gathered():  # type: ignore[attr-defined]
        engine.model.blocks[1].mlp(torch.zeros(1, 2, 16))
    engine.model.blocks[1].mlp(torch.zeros(1, 2, 16))


def offloaded() -> None:
    common.engine(2, fsdp=True, offload="parameters")


class LeavesOneOut(Wide):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x + block(x) if i != 2 or dist.get_rank() == 0 else x
        return x.square().sum() + 0 * y.sum()


def other_blocks() -> None:
    engine = common.engine(2, LeavesOneOut(), objective=common.Classify(), fsdp=True)
    engine.step([{"x": torch.ones(1, 8), "y": torch.zeros(1)}])


@multirank
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (other_blocks, "call the same blocks in the same order"),
        (thawed, "make a new engine after thawing"),
        (part_of_a_block, "inside 'blocks.1' was called by itself"),
        (offloaded, "zero=1, 2 or 3, which can offload"),
        (meta_without_sharding, r"Layout\(fsdp=True\) fills it shard by shard"),
    ],
)
def test_refused_on_every_rank(ranks2: Ranks, attempt: object, message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks2.run(attempt, timeout=30)  # type: ignore[arg-type]


def given_back() -> tuple[bool, bool]:
    torch.manual_seed(1)
    model = common.gpt()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = common.engine(2, model, fsdp=True)
    sharded = all(p.shape != before[name].shape for name, p in engine.model.named_parameters())
    engine.close()
    return sharded, all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@multirank
def test_a_closed_engine_gives_the_model_back_whole(ranks2: Ranks) -> None:
    assert ranks2.run(given_back)[0] == (True, True)


def test_chunks_and_units() -> None:
    rows = torch.arange(10.0).view(5, 2)
    shards = [Chunks().shard(rows, rank, 4) for rank in range(4)]
    assert [len(shard) for shard in shards] == [2, 2, 1, 0]
    assert torch.equal(Chunks().unshard(shards, rows.shape), rows)
    model = common.gpt()
    homes = homes_of(model, blocks_of(model))
    assert homes[id(model.blocks[0].tokens.weight)] == -1  # tied
    assert homes[id(model.blocks[0].positions.weight)] == 0
    assert homes[id(model.blocks[-1].norm.weight)] == 4
    found = [[len(list(unit.parameters())) for unit in blocks_of(m)] for m in (Wide(), nn.Linear(2, 2))]
    assert found == [[6] * 4, []]
