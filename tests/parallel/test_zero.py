"""Each stage of ZeRO computes what one device computes, holds what the paper says, and sends as much."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fmlab import RankError, Ranks
from fmlab.models.families import family_of
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.zero import Slices
from fmlab.train import adamw
from tests.parallel import common

multirank = pytest.mark.multirank
STAGES = (1, 2, 3)


# ---- the same numbers as one device --------------------------------------------------------------------


@multirank
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tie", [True, False])
def test_gpt_clipped_under_adamw(ranks2: Ranks, stage: int, tie: bool) -> None:
    for precision, micro_batches in (("fp64", 3), ("fp32", 1)):
        layout = Layout(data=2, zero=stage, micro_batches=micro_batches, bucket_mb=0.01)
        report = parity(
            partial(common.gpt, tie),
            layout,
            precision=precision,
            ranks=ranks2,
            optimizer="adamw",
            max_grad_norm=0.1,
        )
        report.raise_if_different()
        assert len(report.rows) == len(list(common.gpt(tie).named_parameters()))


@multirank
@pytest.mark.parametrize(
    ("preset", "layout"),
    [
        ("bert-tiny", Layout(data=4, zero=2, replicas=2, micro_batches=3)),
        ("t5-tiny", Layout(data=4, zero=3, replicas=2)),
        ("llama-tiny", Layout(data=4, zero=3, micro_batches=3, offload="parameters")),
        ("t5-tiny", Layout(data=4, zero=1, offload="optimizer", collectives="fmlab")),
    ],
)
def test_families_on_four_ranks(ranks4: Ranks, preset: str, layout: Layout) -> None:
    build = partial(family_of(preset).from_preset, preset, vocab_size=131, num_layers=1)
    parity(build, layout, ranks=ranks4, precision="fp64", max_grad_norm=0.1).raise_if_different()


@multirank
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, zero=1, tensor=2, sequence_parallel=True),
        Layout(data=2, zero=3, tensor=2),
        Layout(data=2, zero=1, pipeline=2, micro_batches=3),
        Layout(data=2, zero=3, pipeline=2, micro_batches=3, recompute="full"),
    ],
)
def test_with_other_strategies(ranks4: Ranks, layout: Layout) -> None:
    # the tied table is cut at the same places on both stages of a pipeline
    report = parity(common.gpt, layout, precision="fp64", ranks=ranks4, optimizer="adamw", max_grad_norm=0.1)
    report.raise_if_different()


@multirank
def test_three_ranks_and_bf16() -> None:
    with Ranks(3, timeout=60) as ranks:
        for stage in STAGES:  # nothing in the model divides by 3
            layout = Layout(data=3, zero=stage, micro_batches=2)
            parity(common.gpt, layout, precision="fp64", ranks=ranks).raise_if_different()
        parity(common.gpt, layout, precision="bf16", ranks=ranks).raise_if_different()


@multirank
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_without_targets_rows_or_micro_batches(ranks4: Ranks, stage: int) -> None:
    full, masked = common.tokens(2, [12, 5]), common.tokens(2, [0, 0], seed=1)
    no_rows = {name: tensor[:0] for name, tensor in full.items()}
    by_rank = [[full, common.tokens(3, [1, 2, 3], seed=2)], [masked], [no_rows], []]
    layout = Layout(data=4, zero=stage)
    parity(common.gpt, layout, batches=[by_rank], precision="fp64", ranks=ranks4).raise_if_different()


@multirank
@pytest.mark.parametrize("stage", STAGES)
def test_branches_that_differ_between_ranks_and_an_unused_layer(ranks2: Ranks, stage: int) -> None:
    by_rank = [[common.rows(3, 0, 1), common.rows(2, 1, 2)], [common.rows(4, 1, 3), common.rows(1, 1, 4)]]
    report = parity(
        common.Branches,
        Layout(data=2, zero=stage),
        batches=[by_rank, by_rank],
        precision="fp64",
        ranks=ranks2,
        objective=common.Classify(),
        optimizer="adamw",
    )
    report.raise_if_different()
    assert {row.name: row.weight.factor for row in report.rows}["never.weight"] == 1.0


class Odd(common.Branches):
    """Parameters of every kind: a number, nothing at all, whole numbers, one that is frozen, a shared
    block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.left.requires_grad_(False)
        self.memory = nn.GRU(6, 6, batch_first=True)  # keeps a list of its weights
        shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([shared, nn.Tanh(), shared])  # one block, run twice

    def forward(self, x: Tensor, y: Tensor, branch: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x, _ = self.memory(x)
        return super().forward(x * self.scale + self.empty.sum() + self.table.sum(), y, branch)


@multirank
@pytest.mark.parametrize("stage", STAGES)
def test_odd_parameters(ranks2: Ranks, stage: int) -> None:
    batches = [[[common.rows(3, 0, 1)], [common.rows(2, 1, 2)]]] * 2
    layout = Layout(data=2, zero=stage)
    kinds: dict[str, Any] = dict(batches=batches, objective=common.Classify(), ranks=ranks2)
    parity(Odd, layout, precision="fp64", optimizer="adamw", **kinds).raise_if_different()


# ---- pieces --------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_slices_cover_every_parameter_once(sizes: list[int], ranks: int) -> None:
    length = -(-sum(sizes) // ranks)
    offset = 0
    for size in sizes:
        rule, whole = Slices(offset, length), torch.arange(2.0 * size).view(size, 2)[:, 0]
        pieces = [rule.shard(whole, rank, ranks) for rank in range(ranks)]
        assert torch.equal(rule.unshard(pieces, whole.shape), whole)
        on_meta = [rule.shard(whole.to("meta"), rank, ranks) for rank in range(ranks)]
        assert [piece.shape for piece in on_meta] == [piece.shape for piece in pieces]
        offset += size


def decayed() -> list[str]:
    groups: list[list[str]] = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        groups.append([name for name, piece in named if piece.dim() >= 2])
        return adamw(1e-3)(named)

    model = common.gpt()
    matrices = [name for name, p in model.named_parameters() if p.dim() >= 2]
    engine = parallelize(model, Layout(data=2, zero=1), CausalLM(), optimizer)
    engine.close()
    assert sorted(groups[0]) == sorted(matrices)
    return groups[0]


@multirank
def test_a_piece_of_a_matrix_still_counts_as_one(ranks2: Ranks) -> None:
    assert ranks2.run(decayed)[0]


def saved_and_loaded(folder: str) -> dict[str, bool]:
    """Save from each stage, load into the next: the steps that follow are the same."""
    batches = [common.tokens(2, [12, 5], seed=dist.get_rank())]
    layouts = [Layout(data=2, zero=3), Layout(data=2), Layout(data=2, zero=1, offload="optimizer")]
    weights, found = [], {}
    for i, layout in enumerate([*layouts, layouts[0]]):
        engine = parallelize(common.gpt(), layout, CausalLM(), adamw(1e-2))
        if i:
            engine.load(f"{folder}/{i - 1}")
            found[f"{i}"] = all(torch.equal(p, weights[-1][n]) for n, p in engine.full_params().items())
        engine.step(batches)
        weights.append({name: p.clone() for name, p in engine.full_params().items()})
        engine.save(f"{folder}/{i}")
        engine.close()
    return found


@multirank
def test_a_checkpoint_of_one_stage_loads_into_another(ranks2: Ranks, tmp_path: Any) -> None:
    assert ranks2.run(saved_and_loaded, str(tmp_path))[0] == {"1": True, "2": True, "3": True}


# ---- what is refused -----------------------------------------------------------------------------------


def outside() -> list[str]:
    engine = parallelize(common.gpt(), Layout(data=2, zero=3), CausalLM(), adamw(1e-3))
    engine.step([common.tokens(2, [12, 5])])
    messages = []
    layer = engine.model.blocks[1]
    for use in (
        lambda: layer.mlp(torch.zeros(1, 2, 16)),
        lambda: engine.model.blocks[0].tokens(torch.tensor([1])),
        lambda: layer.attention.output.bias + 1,
        lambda: engine.model.state_dict(),
    ):
        with pytest.raises(RuntimeError, match="divided among 2 ranks") as error:
            use()
        messages.append(str(error.value))
    assert layer.mlp.up.weight.shape == (64, 16)
    with torch.no_grad():  # the whole model can be called, by all ranks
        assert engine.model(torch.tensor([[1, 2]])).logits.isfinite().all()
    engine.close()
    return messages


@multirank
def test_a_module_used_on_its_own_is_named(ranks2: Ranks) -> None:
    mlp, table, bias, _ = ranks2.run(outside)[0]
    assert mlp.startswith("'blocks.1.mlp.up' was used outside a forward pass")
    assert "'blocks.0.tokens.weight' is divided" in table
    assert "'blocks.1.attention.output.bias'" in bias


@multirank
def test_an_optimizer_of_whole_matrices_is_refused(ranks2: Ranks) -> None:
    def make(kind: Any) -> None:
        parallelize(
            common.gpt(), Layout(data=2, zero=2), CausalLM(), lambda named: kind([p for _, p in named])
        )

    with pytest.raises(RankError, match="Adafactor keeps sums over the rows and columns"):
        ranks2.run(make, torch.optim.Adafactor)


def thaw(stage: int) -> None:
    model = common.gpt()
    model.blocks[1].requires_grad_(False)
    engine = parallelize(model, Layout(data=2, zero=stage), CausalLM(), adamw(1e-3))
    engine.step([common.tokens(2, [12, 5])])
    for _, parameter in engine.ledger.parameters():
        parameter.requires_grad_(True)
    engine.step([common.tokens(2, [12, 5])])


@multirank
@pytest.mark.parametrize("stage", [1, 3])
def test_thawing_needs_a_new_engine(ranks2: Ranks, stage: int) -> None:
    with pytest.raises(RankError, match=r"blocks\.1\..* were frozen when the engine was made"):
        ranks2.run(thaw, stage)


class LeavesOneOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, branch: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) if i != 1 or dist.get_rank() == 0 else x
        return x.square().sum()


def other_blocks() -> None:
    engine = parallelize(LeavesOneOut(), Layout(data=2, zero=3), common.Classify(), adamw(1e-3))
    engine.step([common.rows(2, 0, 1)])


@multirank
def test_ranks_that_run_other_blocks_say_so(ranks2: Ranks) -> None:
    with pytest.raises(RankError, match="must run the same blocks in the same order"):
        ranks2.run(other_blocks)


# ---- what breaks ---------------------------------------------------------------------------------------


class DividedTwice(Composed):
    """Wrong: the summed slices are divided by the ranks, although the losses were by the global count."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> Tensor:
        sums = super()._accumulate(micro_batches, counts)
        for gradient in self.ledger.gradients().values():
            gradient /= self.layout.data
        return sums


class NormOfOwnSlices(Composed):
    """Wrong: each rank takes the norm of what it owns, and clips by that."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        ledger.norm = lambda gradients: torch.linalg.vector_norm(
            torch.stack([gradient.norm() for gradient in gradients.values()])
        )
        return ledger


class GatherForgotten(Composed):
    """Wrong: each rank updates its slices, and nobody tells the others."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        self.states.updated = lambda: None  # type: ignore[method-assign]
        return ledger


class LastVectorNotSummed(Composed):
    """Wrong: one vector's slices keep this rank's own gradients."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        reducer: Any = getattr(self.states, "reducer", self.states)
        right, last = reducer.reduce_scatter, self.states.owned[-1].flat  # type: ignore[attr-defined]

        def reduce_scatter(flat: Any, own: Tensor, vector: Tensor) -> Any:
            if flat is not last:
                return right(flat, own, vector)
            own.copy_(vector[flat.own])

        reducer.reduce_scatter = reduce_scatter
        return ledger


@multirank
@pytest.mark.parametrize(
    ("broken", "stage", "message"),
    [
        (DividedTwice, 1, "each is 0.50x one device's: divided twice"),
        (DividedTwice, 3, "each is 0.50x one device's: divided twice"),
        (NormOfOwnSlices, 2, "another grad_norm on some ranks"),
        (GatherForgotten, 1, "DIFFERS"),
        (LastVectorNotSummed, 2, "gradients differ"),
        (LastVectorNotSummed, 3, "gradients differ"),
    ],
)
def test_parity_finds_what_breaks(ranks2: Ranks, broken: Any, stage: int, message: str) -> None:
    layout = Layout(data=2, zero=stage, bucket_mb=0.01)
    most = None if broken is DividedTwice else 0.1  # clipping hides a factor in the norm
    report = parity(common.gpt, layout, broken, max_grad_norm=most, ranks=ranks2)
    assert not report.ok
    assert message in str(report), str(report)
