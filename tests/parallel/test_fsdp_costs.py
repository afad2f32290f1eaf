"""What full sharding sends, holds, fills and refuses."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmlab import RankError, Ranks
from fmlab.meter import peak_memory, traffic
from fmlab.models.initial import initialise
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize
from fmlab.parallel.fsdp import Chunks, cost
from fmlab.parallel.fsdp.units import blocks_of, homes_of
from tests.parallel import common

multirank = pytest.mark.multirank

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
