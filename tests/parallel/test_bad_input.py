"""Input that is wrong but likely: said before any rank starts, or on all ranks at once, with what to do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from fmlab import RankError, Ranks
from fmlab.models import GPT, GPTConfig, ParallelPlan, Rule
from fmlab.models.plan import Stream
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, cli, parallelize, parity
from fmlab.parallel.checkpoint.optimizers import kept_by
from tests.parallel import common

multirank = pytest.mark.multirank
BRANCH = common.rows(4, 0, 1)
ROWS = common.tokens(8, [12, 3, 7, 1, 5, 12, 2, 9])


# --- a layout ---


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"data": 2.0}, "give a whole number, 1 or more"),
        ({"data": np.bool_(True)}, "give a whole number, 1 or more"),
        ({"zero": 1.0}, "legal are 0, 1, 2, 3"),
        ({"zero": [1]}, "legal are 0, 1, 2, 3"),
        ({"precision": None}, "legal are fp32, bf16"),
        ({"fsdp": "false"}, "give True or False"),  # a text that is not empty is true
        ({"bucket_mb": "25"}, "give a size in MiB above 0"),
        ({"bucket_mb": float("inf")}, "give a size in MiB above 0"),
        ({"bucket_mb": 10**400}, "give a size in MiB above 0"),  # no float is so large
        ({"data": 2**63}, "give a whole number, 1 or more"),
        ({"axis_order": "tensor"}, "name each of tensor, context, data, pipeline once"),
        ({"axis_order": (0, 1, 2, 3)}, "name each of tensor, context, data, pipeline once"),
        ({"stage_cuts": (1.5,), "pipeline": 2}, r"legal are even, weighted, or indices of blocks"),
        ({"stage_cuts": None, "pipeline": 2}, r"legal are even, weighted, or indices of blocks"),
        ({"data": 10**10 + 19, "zero": 1, "replicas": 2}, "does not divide"),  # and does not count to it
    ],
)
def test_values_of_another_kind_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**setting)


def test_numbers_of_other_libraries_become_plain() -> None:
    given = Layout(
        data=np.int64(2), zero=torch.tensor(1), bucket_mb=np.float32(3), pipeline=2, stage_cuts="3"
    )  # type: ignore[arg-type]
    assert given == Layout(data=2, zero=1, bucket_mb=3.0, pipeline=2, stage_cuts=(3,))
    assert [type(value) for value in (given.data, given.zero, given.bucket_mb)] == [int, int, float]


class Planned(nn.Module):
    """A model whose plan is wrong."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.parallel_plan = plan


def plan(**settings: Any) -> Callable[[], ParallelPlan]:
    return lambda: ParallelPlan(**{"rules": (Rule(".*", "replicate"),), "tied": (), "cuts": (1,), **settings})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Planned(plan(cuts=(9,))), r"cut before blocks \[9\], and the model has 2 blocks"),
        (Planned(plan(streams=(Stream("hidden", "x", (1, 2)),))), "the stream 'hidden' in blocks"),
        (Planned(plan(tied=(("a", "b"),))), r"declares the ties \[\('a', 'b'\)\], the model has \[\]"),
        (Planned(plan(rules=())), r"'blocks\.0\.weight' must match exactly one rule"),
        (Planned(plan()()), "parallel_plan must be a method that returns"),
        (Planned(lambda: None), "parallel_plan must be a method that returns"),
        (GPT, "model: give a torch module"),
    ],
)
def test_a_plan_that_does_not_fit_its_model(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(pipeline=2, tensor=2).validate(4, model=model)


# --- parity ---


class Outside(GPT):
    """Has a parameter of which no stage could be said to own it."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(131, 24, 2, 16, 2))
        self.scale = nn.Parameter(torch.ones(16))

    def parallel_plan(self) -> ParallelPlan:
        found = super().parallel_plan()
        return replace(found, rules=(*found.rules, Rule("scale", "replicate")))


class Boom(Exception):
    """Cannot be made again from what it says."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} of {b}")


def test_parity_refuses_before_a_rank_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("fmlab.ranks.Ranks.__init__", started)
    two, again = Layout(data=2), Layout(data=2, recompute="full")
    split = Layout(pipeline=2, schedule="zb-h1")
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("give a function or a class, not an object of type Linear", lambda: parity(nn.Linear(2, 2), two)),  # type: ignore[arg-type]
        ("must return a torch module, and it gave None", lambda: parity(lambda: None, two)),  # type: ignore[arg-type, return-value]
        ("for one step on one batch give", lambda: parity(common.gpt, two, batches=ROWS)),  # type: ignore[arg-type]
        (
            "step 1: .*use 2 or 4 rows",
            lambda: parity(common.gpt, two, batches=[ROWS, common.tokens(3, [1] * 3)]),
        ),
        ("data for 3 ranks, the layout has data=2", lambda: parity(common.gpt, two, batches=[[[]] * 3])),
        ("max_grad_norm=-1: give a norm above 0", lambda: parity(common.gpt, two, max_grad_norm=-1)),
        ("unknown backend 'gpu'", lambda: parity(common.gpt, two, backend="gpu")),
        ("is a class; give an object", lambda: parity(common.gpt, two, objective=CausalLM)),  # type: ignore[arg-type]
        (
            "no layers to compute again",
            lambda: parity(common.Branches, again, batches=[BRANCH]),
        ),
        ("FSDP keeps its shards", lambda: parity(common.gpt, Layout(data=2, fsdp=True, offload="optimizer"))),
        (
            "splits the backward pass",
            lambda: parity(common.gpt, replace(split, zero=3)),
        ),
        ("stands in no block", lambda: parity(Outside, Layout(pipeline=2))),
        ("layout: give a fmlab.parallel.Layout", lambda: parity(common.gpt, {"data": 2})),  # type: ignore[arg-type]
        ("is a folder; name a file in it", lambda: cli.main(["--html", str(tmp_path)])),
        ("called without arguments, and raised TypeError", lambda: cli.main(["--objective", "json:loads"])),
        ("SyntaxError", lambda: cli.main(["--model", "half:build"])),
    ]
    (tmp_path / "half.py").write_text("def build(:\n")
    monkeypatch.chdir(tmp_path)
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()


@multirank
def test_a_pool_of_another_size_and_an_error_that_cannot_be_sent(ranks2: Ranks) -> None:
    with pytest.raises(ValueError, match=r"needs 4 ranks .*, but there are 2"):
        parity(common.gpt, Layout(data=4), ranks=ranks2)
    without = {**ROWS, "labels": torch.full_like(ROWS["labels"], -100)}
    with pytest.raises(RankError, match="no target on any rank, so that there is nothing to compare"):
        parity(common.gpt, Layout(data=2), batches=[without], ranks=ranks2)
    with pytest.raises(RankError, match=r"the loss on one device is \{'class': nan\}"):
        parity(NotANumber, Layout(data=2), batches=[BRANCH], objective=common.Classify(), ranks=ranks2)
    with pytest.raises(RankError, match=r"Boom: 1 of 2"):
        parity(Breaks, Layout(data=2), batches=[BRANCH], objective=common.Classify(), ranks=ranks2)


class NotANumber(common.Branches):
    def forward(self, **batch: Any) -> Any:
        return super().forward(**batch) * float("nan")


class Breaks(nn.Module):
    """Its own error must reach the user, from whichever rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, **_: Any) -> None:
        raise Boom(1, 2)


# --- an engine ---


def own_parameters(layout: Layout) -> None:
    """The optimizer has the model's parameters, in the place of which the layout has put others."""
    model = common.gpt()
    mine = list(model.parameters())
    parallelize(model, layout, CausalLM(), lambda _: torch.optim.SGD(mine, lr=0.1))


def of_other_layouts() -> None:
    common.engine(2, zero=dist.get_rank())


def thawed(**layout: Any) -> None:
    model = common.gpt()
    model.blocks[1].requires_grad_(False)
    engine = common.engine(2, model, **layout)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(True)
    try:
        engine.step(Layout(data=2).split(ROWS, dist.get_rank()))
    finally:
        engine.close()


@multirank
def test_refused_on_every_rank(ranks2: Ranks) -> None:
    for layout in (Layout(data=2, zero=1), Layout(tensor=2), Layout(data=2, fsdp=True)):
        with pytest.raises(RankError, match=r"not among those the engine trains.*not from model\.parameters"):
            ranks2.run(own_parameters, layout)
    with pytest.raises(RankError, match=r"rank 0 for Layout\(data=2\) .*rank 1 for Layout\(data=2, zero=1\)"):
        ranks2.run(of_other_layouts)
    for settings in ({"recompute": "full"}, {"zero": 1}):
        with pytest.raises(RankError, match="make a new engine after thawing"):
            ranks2.run(thawed, **settings)


def test_what_one_device_refuses() -> None:
    plain: Any = common.engine(1)
    for given in (
        ROWS,
        [[ROWS]],
        None,
        (batch for batch in [ROWS]),
    ):  # a generator would be empty when it runs
        with pytest.raises(ValueError, match=r"the list of this rank's micro-batches.*: step\(\[batch\]\)"):
            plain.step(given)
    plain.close()
    with pytest.raises(ValueError, match="this engine was closed"):  # its ranks would no longer agree
        plain.step([ROWS])
    with pytest.raises(ValueError, match="there is no process group; start it with torchrun"):
        common.engine(1, choice="torch", fsdp=True)
    with pytest.raises(ValueError, match=r"have a method counts\(batch\)"):
        common.engine(1, objective=lambda model, batch: model(**batch)["loss_sum"])
    with pytest.raises(ValueError, match=r"'?0'? is wrapped in DataParallel.*wrapped\.module"):
        common.engine(1, nn.Sequential(DataParallel(nn.Linear(2, 2))))


# --- checkpoints ---


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Any) -> None:
    def engine(kind: Callable[..., Any], **settings: Any) -> Any:
        return parallelize(
            GPT(GPTConfig(131, 24, 1, 16, 2)),
            Layout(),
            CausalLM(),
            lambda named: kind([p for _, p in named], lr=0.1, **settings),
        )

    saved = engine(torch.optim.SGD, momentum=0.9)
    saved.step([ROWS])
    saved.save(tmp_path / "sgd")
    engine(torch.optim.SGD, momentum=0.9).load(tmp_path / "sgd")
    with pytest.raises(ValueError, match=r"momentum_buffer, and AdamW keeps exp_avg, exp_avg_sq, step"):
        engine(torch.optim.AdamW).load(tmp_path / "sgd")
    with pytest.raises(ValueError, match="SGD keeps nothing"):
        engine(torch.optim.SGD).load(tmp_path / "sgd")
    weight = nn.Parameter(torch.ones(2))
    assert kept_by(torch.optim.LBFGS([weight])) == []  # cannot be asked
    assert not weight.grad
