"""A checkpoint of any layout goes on under any other; nothing of it depends on who wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmlab import RankError, Ranks
from fmlab.models import GPT
from fmlab.models.plan import Rule
from fmlab.parallel import Layout
from fmlab.parallel.checkpoint import Piece, boxes, load_model
from fmlab.parallel.fsdp import Chunks
from fmlab.parallel.grid import Grid
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.mesh import Axis, Mesh
from tests.parallel import common

multirank = pytest.mark.multirank
ROWS = common.tokens(8, [12, 3, 7, 1, 5, 12, 2, 9])


def train(
    layout: dict[str, Any], steps: int, save: str = "", load: str = "", dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Weights and optimizer state after some steps that began anew, or from a checkpoint."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(3 if not load else 100 + (dist.get_rank() if world > 1 else 0))
    settings = {"fsdp": True} | layout if world > 1 else layout
    data = settings.pop("data", world)
    choice = settings.pop("choice", "fmlab")
    engine = common.engine(data, common.gpt().to(dtype), choice, adamw=True, **settings)
    if load:
        engine.load(load)
    place = engine.layout.data_rank(dist.get_rank()) if world > 1 else 0
    for _ in range(steps):
        engine.step(engine.layout.split(ROWS, place))
    if save:
        engine.save(save)
    state = {**engine.full_params(), **engine.full_optimizer_state()}
    found = {name: tensor.clone() for name, tensor in state.items()}
    engine.close()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=1e-8, atol=1e-12)


@multirank
def test_from_any_layout_to_any_other(ranks2: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    straight = train({}, steps=5)
    assert any(name.endswith("/exp_avg_sq") for name in straight)
    plain, two, hybrid, replicated, four = (str(tmp_path / n) for n in ("plain", "2", "2x2", "ddp", "4"))
    train({}, 1, save=plain)
    ranks2.run(train, {"micro_batches": 2}, 1, two, plain)
    ranks4.run(train, {"replicas": 2}, 1, hybrid, two)
    ranks2.run(train, {"fsdp": False}, 1, replicated, hybrid)
    same(straight, ranks4.run(train, {"reshard": False}, 1, four, replicated)[0])
    same(straight, train({}, 0, load=four))
    assert (Path(plain) / "model.safetensors").exists()
    assert sorted(p.name for p in Path(four).iterdir()) == [
        "manifest.json",
        *(f"part-000{rank}.safetensors" for rank in range(4)),
    ]
    sizes = [p.stat().st_size for p in Path(four).glob("part-*")]
    assert max(sizes) < 0.45 * sum(sizes)  # each wrote its own: with 131 rows nobody's part is a quarter
    export(Path(four), straight, tmp_path)


@multirank
def test_through_every_strategy_and_engine(ranks4: Ranks, tmp_path: Path) -> None:
    train({}, 1, save=str(tmp_path / "0"))
    layouts: list[dict[str, Any]] = [
        {"data": 2, "tensor": 2},
        {"data": 2, "pipeline": 2, "micro_batches": 2},
        {"fsdp": False, "zero": 2},
        {"choice": "torch"},
        {"data": 2, "tensor": 2, "fsdp": False, "zero": 3},
    ]
    for i, layout in enumerate(layouts):
        found = ranks4.run(train, layout, 1, str(tmp_path / f"{i + 1}"), str(tmp_path / f"{i}"))[0]
    same(train({}, 1 + len(layouts)), found)


def export(checkpoint: Path, weights: dict[str, Tensor], tmp_path: Path) -> None:
    """To Hugging Face's format, in one process, and back."""
    model = load_model(common.gpt().double(), checkpoint)
    model.save_pretrained(tmp_path / "hf")
    again = GPT.from_pretrained(tmp_path / "hf")
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter, weights[name].float())
    with pytest.raises(
        ValueError, match=r"blocks\.0\.tokens\.weight is \(131, 16\), the model has \(4096, 128\)"
    ):
        load_model(GPT.from_preset("gpt2-tiny"), checkpoint)


@multirank
def test_going_on_is_bitwise_at_the_same_layout(ranks2: Ranks, tmp_path: Path) -> None:
    layout = {"micro_batches": 2, "precision": "bf16"}
    folder = str(tmp_path / "five")
    straight = ranks2.run(train, layout, 10, dtype=torch.float32)[0]
    ranks2.run(train, layout, 5, folder, dtype=torch.float32)
    resumed = ranks2.run(train, layout, 5, "", folder, torch.float32)[0]
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def fails_to_write(folder: str) -> None:
    engine = common.engine(2, fsdp=True)
    engine.step(Layout(data=2).split(ROWS, dist.get_rank()))
    if dist.get_rank() == 1:
        from fmlab.parallel.checkpoint.snapshot import Snapshot

        Snapshot.write = lambda *_: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    engine.save(folder)


def save_twice(folder: str) -> None:
    engine = common.engine(2, fsdp=True)
    engine.save(folder)
    engine.save(folder)


@multirank
def test_whole_or_absent_and_checked(ranks2: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exists already"):
        ranks2.run(save_twice, str(tmp_path / "twice"))
    with pytest.raises(RankError, match="rank 1 could not write its part"):
        ranks2.run(fails_to_write, str(tmp_path / "failed"))
    assert [p.name for p in tmp_path.iterdir()] == ["twice"]  # nothing is left of the other
    ranks2.restart()
    whole = (tmp_path / "twice" / "part-0001.safetensors").read_bytes()
    (tmp_path / "twice" / "part-0001.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RankError, match=r"part-0001\.safetensors is damaged"):
        ranks2.run(train, {}, 0, "", str(tmp_path / "twice"))
    table = json.loads((tmp_path / "twice" / "manifest.json").read_text())
    assert set(table["files"]) == {"part-0000.safetensors", "part-0001.safetensors"}


# --- where a piece lies ---


class OneOf(Axis):
    """A place on a line of which the other ranks need not exist."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(name, range(size), rank, None)


class Stretch:
    """Cuts a parameter laid out as one row of numbers, as ZeRO does."""

    def shard(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        return tensor.reshape(-1).tensor_split(world_size)[rank].clone()

    def unshard(self, shards: list[Tensor], shape: torch.Size) -> Tensor:
        return torch.cat(shards).view(shape)


CUTS: dict[str, list[tuple[Any, int]]] = {
    "rows": [(Chunks(), 4)],
    "heads of three matrices, then rows": [(Rule(".*", "column", parts=3, unit=2), 2), (Chunks(), 3)],
    "columns, then a stretch": [(Rule(".*", "row"), 3), (Stretch(), 2)],
    "a padded vocabulary": [(Rule(".*", "vocab"), 5), (Chunks(), 2)],
    "a stretch": [(Stretch(), 7)],
    "nothing": [],
}


@pytest.mark.parametrize("shape", [(12, 6), (12, 3, 4), (12,)])
@pytest.mark.parametrize("case", CUTS)
def test_boxes_of_all_ranks_are_the_whole(case: str, shape: tuple[int, ...]) -> None:
    if len(shape) == 1 and "columns" in case:
        pytest.skip("a vector has no columns")
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    found = torch.zeros(shape)
    places: list[list[int]] = [[]]
    for _, size in CUTS[case]:
        places = [[*place, rank] for place in places for rank in range(size)]
    for place in places:
        model = nn.Module()
        model.weight = nn.Parameter(whole.clone())
        ledger, piece = Ledger(model), whole
        for (rule, size), rank in zip(CUTS[case], place, strict=True):
            piece = rule.shard(piece, rank, size)
            ledger.cut("weight", OneOf("shard", rank, size), rule, nn.Parameter(piece))
        mine = Piece(piece, shape, boxes(ledger, "weight"))
        for box in mine.boxes:
            assert torch.equal(box.of(piece), box.of_whole(whole))
            assert mine.at(box.offsets).data_ptr() == box.of(piece).data_ptr()  # a view: reading fills it
            box.of_whole(found).add_(box.of(piece))
    assert torch.equal(found, whole)  # every element once


def test_a_number_without_dims() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    for rank in range(2):
        ledger = Ledger(model, Mesh(Grid({}), rank=0))
        piece = Chunks().shard(torch.tensor(2.0), rank, 2)
        ledger.cut("scale", OneOf("shard", rank, 2), Chunks(), nn.Parameter(piece))
        assert [box.of(piece).item() for box in boxes(ledger, "scale")] == [2.0] * (rank == 0)


def _save_on_the_first_rank_alone(folder: str) -> None:
    engine = common.engine(dist.get_world_size(), common.gpt())
    engine.step(engine.layout.split(ROWS, dist.get_rank()))
    if dist.get_rank() == 0:  # the common mistake: saving is a call of all ranks
        engine.save(folder)


@multirank
def test_saving_on_one_rank_alone_names_the_ranks_that_did_not_come(ranks2: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with pytest.raises(RankError, match=r"rank 1\b.* did not enter broadcast .*, which rank 0\b.* entered"):
        ranks2.run(_save_on_the_first_rank_alone, str(folder))
    assert not folder.exists()
