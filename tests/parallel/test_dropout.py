"""Dropout masks depend on the numbers of elements alone, look random, and are the same under every layout."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab import RankError, Ranks
from fmlab.models import GPT, GPTConfig
from fmlab.models.attention import AttentionMask, flash_core, quadratic_core, sdpa_core
from fmlab.models.dropout import Masks, chunk_number, drawing_masks, drop_out, from_number, holding
from fmlab.models.families import family_of
from fmlab.parallel import Layout, parity
from fmlab.parallel.ddp import DataParallel
from tests.parallel import common

multirank = pytest.mark.multirank
CPU = torch.device("cpu")


def mask(*shape: int, p: float = 0.3, dims: str = "bld", masks: Masks | None = None, **at: Any) -> Tensor:
    return (masks or Masks(1, 2)).kept(torch.Size(shape), dims, p, CPU, key=7, at=at)


# ---- what a mask depends on ------------------------------------------------------------------------------


def test_a_part_draws_what_the_whole_draws() -> None:
    whole = mask(6, 10, 33)
    assert torch.equal(mask(2, 10, 33, b=range(2, 4)), whole[2:4])
    assert torch.equal(mask(6, 5, 11, l=range(0, 10, 2), d=range(11, 22)), whole[:, ::2, 11:22])
    columns = torch.tensor([3, 32, 9])  # the last dim in any order
    assert torch.equal(mask(6, 10, 3, d=columns), whole[..., columns])
    held = {"b": from_number(2), "d": chunk_number(2)}
    assert torch.equal(mask(3, 10, 11, masks=Masks(1, 2, held)), whole[2:5, :, 22:])
    assert mask(0, 10, 33).shape == (0, 10, 33)
    assert mask(6, 10, 0).shape == (6, 10, 0)


def test_every_number_makes_another_mask() -> None:
    def draw(seed: int = 0, step: int = 0, block: int = 0, place: int = 0) -> Tensor:
        return Masks(seed, step, block=block, place=place).kept(torch.Size((64, 64)), "bd", 0.5, CPU)

    found = [draw(), draw(seed=1), draw(step=1), draw(block=1), draw(place=1), draw(1, 1), draw(2, 0)]
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert abs((one == other).double().mean().item() - 0.5) < 5 * 0.5 / 64
    assert torch.equal(draw(3, 4, 5, 6), draw(3, 4, 5, 6))


def test_places_are_counted_in_each_block() -> None:
    x, masks = torch.ones(8, 8), Masks(0, 0)
    with drawing_masks(masks):
        first, second = drop_out(x, 0.5, True, "bd"), drop_out(x, 0.5, True, "bd")
    with drawing_masks(masks):
        assert torch.equal(drop_out(x, 0.5, True, "bd"), first)
        with holding(b=from_number(3)):
            assert torch.equal(drop_out(x[3:], 0.5, True, "bd"), second[3:])
    assert not torch.equal(first, second)


def test_without_masks_it_is_torchs() -> None:
    x = torch.rand(5, 7)
    torch.manual_seed(0)
    ours = drop_out(x, 0.4, True, "bd")
    torch.manual_seed(0)
    assert torch.equal(ours, F.dropout(x, 0.4))
    assert drop_out(x, 0.4, False, "bd") is x


# ---- how random it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_rate_and_scale(p: float) -> None:
    n = 64 * 64 * 256
    kept = mask(64, 64, 256, p=p)
    assert abs((~kept).double().mean().item() - p) < 1 / 65536 + 4 * math.sqrt(p * (1 - p) / n)
    for dim in (0, 1, 2):  # no row, position or feature is favoured
        rates = (~kept).double().transpose(0, dim).flatten(1).mean(1)
        assert (rates - p).abs().max() < 5.5 * math.sqrt(p * (1 - p) * len(rates) / n)
    with drawing_masks(Masks(0, 0)):
        assert drop_out(torch.ones(64, 64, 256), p, True, "bld").double().mean().item() == pytest.approx(
            1, abs=5 * math.sqrt(p / (1 - p) / n)
        )


def test_elements_are_independent() -> None:
    x = mask(128, 64, 64, p=0.5).double() * 2 - 1
    n = x.numel()
    for dim in (0, 1, 2):  # neighbours at any distance, the four that share a hash among them
        for distance in (1, 2, 3, 4, 5, 8, 16):
            other = x.roll(distance, dim)
            assert abs((x * other).sum().item()) < 5 * math.sqrt(n)
    # what a hash folded dim by dim could get wrong: the four corners of a rectangle
    corners = x[:-1, :, :-1] * x[1:, :, :-1] * x[:-1, :, 1:] * x[1:, :, 1:]
    assert abs(corners.sum().item()) < 5 * math.sqrt(corners.numel())
    features = x.flatten(0, 1)
    correlation = (features.T @ features / len(features)).fill_diagonal_(0)
    assert correlation.abs().max() < 5.5 / math.sqrt(len(features))
    spread = correlation.square().mean().item() * len(features) * 64 / 63
    assert spread == pytest.approx(1, abs=0.15)
    ones = (x > 0).view(-1, 8).long() @ (2 ** torch.arange(8))  # all 256 patterns of 8 neighbours
    expected = len(ones) / 256
    chi_square = ((torch.bincount(ones, minlength=256) - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


# ---- in attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", [sdpa_core, partial(flash_core, tile=5)])
def test_cores_draw_the_same(core: Any) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, 12, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    found = []
    for each in (quadratic_core, core):
        with drawing_masks(Masks(5, 6)):
            mixed = each(*inputs, AttentionMask(True, 12, 12), 0.3)
        found.append([mixed, *torch.autograd.grad(mixed.square().sum(), inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# ---- under a layout --------------------------------------------------------------------------------------


def gpt() -> GPT:
    return GPT(
        GPTConfig(vocab_size=131, max_positions=24, num_layers=3, hidden_size=16, num_heads=2, dropout=0.2)
    )


def family(name: str) -> nn.Module:
    model: nn.Module = family_of(name).from_preset(name, vocab_size=131, num_layers=1, dropout=0.1)
    return model


@multirank
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "micro_batches": 2},
        {"tensor": 2},
        {"context": 2},
        {"data": 2, "zero": 2},
    ],
    ids=str,
)
def test_parity_with_dropout(ranks2: Ranks, layout: dict[str, Any]) -> None:
    parity(gpt, Layout(**layout), precision="fp64", ranks=ranks2).raise_if_different()


@multirank
def test_parity_of_other_families(ranks2: Ranks) -> None:
    cases = {
        "bert-tiny": Layout(data=2, micro_batches=2),
        "t5-tiny": Layout(tensor=2, sequence_parallel=True),
    }
    for name, layout in cases.items():
        parity(partial(family, name), layout, precision="fp64", ranks=ranks2).raise_if_different()


@multirank
def test_rows_are_numbered_over_uneven_ranks(ranks2: Ranks) -> None:
    full, masked = common.tokens(2, [12, 5]), common.tokens(3, [0, 0, 0], seed=1)
    by_rank = [[masked, full, common.tokens(1, [3])], [full]]
    parity(gpt, Layout(data=2), batches=[by_rank], precision="fp64", ranks=ranks2).raise_if_different()


class OwnRowsFromZero(DataParallel):
    """Wrong: each rank numbers its rows as if it were alone, so that ranks draw the same masks."""

    def _rows_before(self, micro_batches: Any) -> int:
        return 0


class TheSameEveryStep(DataParallel):
    """Wrong: the step is not counted."""

    def masks(self, batch: Any) -> Any:
        self.steps = 0
        return super().masks(batch)


@multirank
def test_wrong_masks_are_found(ranks2: Ranks) -> None:
    for broken in (OwnRowsFromZero, TheSameEveryStep):
        report = parity(gpt, Layout(data=2), broken, precision="fp64", ranks=ranks2, steps=2)
        assert not report.ok


@multirank
def test_other_engines_and_other_randomness_are_refused(ranks2: Ranks) -> None:
    with pytest.raises(RankError, match="build the model without dropout or other randomness"):
        parity(gpt, Layout(data=2), "torch", ranks=ranks2)


def _train(steps: int, folder: str | None = None, load: str | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = common.engine(2, gpt(), adamw=True)
    if load is not None:
        engine.load(load)
        engine.steps = 2  # what a trainer does
    for step in range(engine.steps, steps):
        rows = common.tokens(4, [12, 3, 7, 1], seed=step)
        engine.step(engine.layout.split(rows, torch.distributed.get_rank()))
    if folder is not None:
        engine.save(folder)
    found = {name: p.clone() for name, p in engine.full_params().items()}
    engine.close()
    return found


@multirank
def test_resume_is_bitwise(ranks2: Ranks, tmp_path: Path) -> None:
    whole = ranks2.run(_train, 4)[0]
    ranks2.run(_train, 2, str(tmp_path / "two"))
    resumed = ranks2.run(_train, 4, None, str(tmp_path / "two"))[0]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
