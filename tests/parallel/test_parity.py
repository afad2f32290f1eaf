"""Every engine computes what one device computes; and parity finds the ones that do not."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fmlab import RankError, Ranks
from fmlab.models.families import family_of
from fmlab.parallel import Engine, Layout, ParityError, StepResult, parity
from fmlab.parallel.cli import main
from fmlab.parallel.ddp import DataParallel
from tests.parallel import common

multirank = pytest.mark.multirank
UNEVEN = [12, 3, 7, 1, 5, 12, 2, 9]


@multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_gpt_on_two_ranks(ranks2: Ranks, engine: str, micro_batches: int, precision: str) -> None:
    layout = Layout(data=2, micro_batches=micro_batches, bucket_mb=0.01)
    report = parity(common.gpt, layout, engine, precision=precision, steps=2, ranks=ranks2)
    report.raise_if_different()
    assert len(report.rows) == len(list(common.gpt().named_parameters()))  # every gradient was compared
    assert len(set(report.targets)) == 2  # on ranks with unequal counts


@multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
@pytest.mark.parametrize("tie", [True, False])
def test_gpt_on_four_ranks_clipped_under_adamw(ranks4: Ranks, engine: str, tie: bool) -> None:
    build = partial(common.gpt, tie_embeddings=tie)
    layout = Layout(data=4, micro_batches=2)
    for precision in ("fp32", "fp64"):
        report = parity(
            build, layout, engine, precision=precision, ranks=ranks4, optimizer="adamw", max_grad_norm=0.1
        )
        report.raise_if_different()
        assert 0 < report.excluded < 0.2 * sum(p.numel() for p in build().parameters())


@multirank
@pytest.mark.parametrize("preset", ["bert-tiny", "t5-tiny", "llama-tiny"])
def test_families_with_their_own_objectives(ranks2: Ranks, ranks4: Ranks, preset: str) -> None:
    build = partial(family_of(preset).from_preset, preset, vocab_size=131, num_layers=1)
    for data, ranks in ((2, ranks2), (4, ranks4)):
        report = parity(build, Layout(data=data, micro_batches=2), ranks=ranks, precision="fp64")
        report.raise_if_different()
        assert len(set(report.targets)) > 1
        assert len(report.rows) == len(list(build().named_parameters()))  # BERT's sentence head too


@multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
def test_ranks_without_targets_rows_or_micro_batches(ranks4: Ranks, engine: str) -> None:
    full, masked = common.tokens(2, [12, 5]), common.tokens(2, [0, 0], seed=1)
    no_rows = {name: tensor[:0] for name, tensor in full.items()}
    by_rank = [[full, common.tokens(3, [1, 2, 3], seed=2)], [masked], [no_rows], []]
    report = parity(common.gpt, Layout(data=4), engine, batches=[by_rank], precision="fp64", ranks=ranks4)
    report.raise_if_different()
    assert report.targets == (23, 0, 0, 0)


@multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
def test_branches_that_differ_between_ranks_and_an_unused_layer(ranks2: Ranks, engine: str) -> None:
    # rank 0 uses `left` in its first micro-batch only, rank 1 only `right`; `never` has no gradient anywhere
    by_rank = [[common.rows(3, 0, 1), common.rows(2, 1, 2)], [common.rows(4, 1, 3)]]
    report = parity(
        common.Branches,
        Layout(data=2),
        engine,
        batches=[by_rank, by_rank],
        precision="fp64",
        ranks=ranks2,
        objective=common.Classify(),
        optimizer="adamw",  # whose weight decay would move an unused weight, had it a gradient of zero
    )
    report.raise_if_different()
    assert {row.name: row.weight.factor for row in report.rows}["never.weight"] == 1.0


def frozen_gpt() -> nn.Module:
    model = common.gpt()
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    return model


@multirank
def test_frozen_layer_stays_as_it_is(ranks2: Ranks) -> None:
    report = parity(frozen_gpt, Layout(data=2), precision="fp64", ranks=ranks2, optimizer="adamw")
    report.raise_if_different()
    frozen = [row for row in report.rows if row.name.startswith("blocks.1.")]
    assert frozen
    assert all(row.weight.error == 0 for row in frozen)


@multirank
def test_divided_twice_is_found_with_its_factor(ranks4: Ranks) -> None:
    report = parity(common.gpt, Layout(data=4), common.DividedTwice, ranks=ranks4)
    assert not report.ok
    assert all(row.gradient.factor == pytest.approx(0.25, rel=1e-4) for row in report.different)
    assert report.grad_norm.factor == pytest.approx(0.25, rel=1e-4)
    assert "each is 0.25x one device's: divided twice" in str(report)
    with pytest.raises(ParityError, match="DividedTwice"):
        report.raise_if_different()


@multirank
def test_mean_of_means_is_found_on_unequal_counts_only(ranks2: Ranks) -> None:
    uneven = parity(common.gpt, Layout(data=2), common.MeanOfMeans, ranks=ranks2)
    assert not uneven.ok
    assert "weighted by their counts" in uneven.diagnosis
    even = [common.tokens(4, [6, 6, 6, 6])]
    assert parity(common.gpt, Layout(data=2), common.MeanOfMeans, batches=even, ranks=ranks2).ok


@multirank
def test_a_bucket_that_is_not_summed_is_named(ranks2: Ranks) -> None:
    report = parity(common.gpt, Layout(data=2, bucket_mb=0.02), common.LastBucketForgotten, ranks=ranks2)
    last = [row.name for row in report.different]
    assert last == list(report.ranks_differ)
    assert report.first is not None
    assert report.first.name == "blocks.0.tokens.weight"  # registered first, so sent last
    assert len(last) < len(report.rows) // 2
    assert "not summed over ranks" in report.diagnosis


class Stale(DataParallel):
    """Wrong: what the step before left is added to the gradient."""

    kept: Any = None

    def _accumulate(self, micro_batches: Any, counts: Any) -> torch.Tensor:
        sums = super()._accumulate(micro_batches, counts)
        for name, gradient in (self.kept or {}).items():
            self.ledger.gradients()[name].add_(gradient)
        self.kept = {name: gradient.clone() for name, gradient in self.ledger.gradients().items()}
        return sums


class ScaledWithAccumulation(DataParallel):
    """Wrong: a mean over micro-batches of what was divided by the global count already."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> torch.Tensor:
        sums = super()._accumulate(micro_batches, counts)
        for gradient in self.ledger.gradients().values():
            gradient /= len(micro_batches)
        return sums


class ClippedTwiceAsHard(DataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        clip = self.ledger.clip_
        self.ledger.clip_ = lambda g, norm, most: clip(g, norm, most / 2)  # type: ignore[method-assign]


class UpdatedTwice(DataParallel):
    def step(self, micro_batches: Any) -> StepResult:
        result = super().step(micro_batches)
        self.optimizer.step()
        return result


class DriftsOnOneRank(DataParallel):
    def step(self, micro_batches: Any) -> StepResult:
        result = super().step(micro_batches)
        with torch.no_grad():
            next(self.model.parameters())[0, 0] += 1e-6 * dist.get_rank()
        return result


class OneRankReportsItsOwn(DataParallel):
    field = "total"

    def step(self, micro_batches: Any) -> StepResult:
        result = super().step(micro_batches)
        return (
            replace(result, **{self.field: 1.5 * getattr(result, self.field)}) if dist.get_rank() else result
        )


class OneRankReportsItsNorm(OneRankReportsItsOwn):
    field = "grad_norm"


class MiscountsTargets(DataParallel):
    def step(self, micro_batches: Any) -> StepResult:
        result = super().step(micro_batches)
        return replace(result, count=result.count + 1)


class SaysSkipped(DataParallel):
    def step(self, micro_batches: Any) -> StepResult:
        return replace(super().step(micro_batches), skipped=True)


@multirank
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Stale, "something kept from the step before"),
        (ScaledWithAccumulation, r"gradient norm: DIFFERS.* 0\.5x one device's"),
        (ClippedTwiceAsHard, "each is 0.50x"),
        (UpdatedTwice, "the update differs"),
        (DriftsOnOneRank, "on the update differs|reports differs, or the ranks do"),
        (OneRankReportsItsOwn, "step 1 has another loss on some ranks"),
        (OneRankReportsItsNorm, "step 1 has another grad_norm on some ranks"),
        (MiscountsTargets, r"step 1 counts \d+ targets instead of \d+"),
        (SaysSkipped, "step 1 is called skipped"),
    ],
)
def test_every_broken_engine_is_found(ranks2: Ranks, broken: type[Engine], message: str) -> None:
    report = parity(common.gpt, Layout(2, micro_batches=2), broken, max_grad_norm=0.1, ranks=ranks2)
    assert not report.ok
    assert re.search(message, str(report)), str(report)


class WholeNumbers(common.Branches):
    """A frozen parameter of integers and a buffer that differs from rank to rank at first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale, y, branch)


@multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
def test_integer_parameters_and_buffers(ranks2: Ranks, engine: str) -> None:
    batches = [[[common.rows(3, 0, 1)], [common.rows(2, 1, 2)]]]
    layout, objective = Layout(data=2), common.Classify()
    parity(WholeNumbers, layout, engine, batches, objective=objective, ranks=ranks2).raise_if_different()


@multirank
def test_one_device_and_accumulation_without_ranks() -> None:
    batches = [common.tokens(8, UNEVEN)]
    report = parity(common.gpt, Layout(micro_batches=4), batches=batches, precision="fp64")
    report.raise_if_different()


def dropout_gpt() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5))


class Passes:
    def __call__(self, model, batch):  # type: ignore[no-untyped-def]
        from fmlab.objectives import Term

        return {"sum": Term(sum=model(batch["x"]).sum(), count=torch.tensor(1))}

    def counts(self, batch):  # type: ignore[no-untyped-def]
        return {"sum": torch.tensor(1)}


@multirank
def test_a_random_forward_is_refused_at_once(ranks2: Ranks) -> None:
    batches = [{"x": torch.ones(2, 40)}]
    with pytest.raises(RankError, match="without dropout"):
        parity(dropout_gpt, Layout(data=2), batches=batches, ranks=ranks2, objective=Passes())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"precision": "fp8"}, "legal are fp32, fp64, bf16"),
        ({"optimizer": "lion"}, "legal are sgd, adamw"),
        ({"optimizer": "adamw", "precision": "bf16"}, "compare AdamW in fp32 or fp64"),
        ({"steps": 0}, "0 steps: give a whole number, 1 or more"),
    ],
)
def test_illegal_choices(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parity(common.gpt, Layout(), **kwargs)  # type: ignore[arg-type]


@multirank
def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "report.html"
    assert main(["--model", "gpt2-tiny", "--data", "2", "--html", str(page)]) == 0
    assert "parity EQUAL to one device: engine fmlab, data=2" in capsys.readouterr().out
    assert "<table>" in page.read_text()
    (tmp_path / "my_model.py").write_text(
        "from tests.parallel.common import gpt\ndef build():\n    return gpt(tie_embeddings=False)\n"
        "def wrong():\n    raise KeyError('no weights')\n"
        "from tests.parallel.common import Branches, Classify, rows\n"
        "def batches():\n    return [rows(4, 0, 1)]\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "my_model:build", "--data", "1", "--micro-batches", "2"]) == 0
    assert main(["--model", "my_model:build", "--data", "2"]) == 0  # the ranks do not know this folder
    own = ["--model", "my_model:Branches", "--data", "2", "--zero", "1"]
    assert main([*own, "--batches", "my_model:batches", "--objective", "my_model:Classify"]) == 0
    with pytest.raises(ValueError, match=r"Branches has no config.*--batches module:function"):
        main(own)
    assert main(["--model", "my_model:wrong", "--data", "2"]) == 2
    assert "KeyError: 'no weights'" in capsys.readouterr().err
    for arguments, message in (
        (["--model", "my_model:missing"], "cannot load 'my_model:missing'"),
        (["--model", "gpt5"], "presets are: gpt2, .*gpt2-tiny, .*bert-tiny, .*; or give module:function"),
        (["--micro-batches", "0"], "whole number, 1 or more"),
        (["--html", str(page / "below-a-file")], "cannot write to"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            main(arguments)
