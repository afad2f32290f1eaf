"""What an engine reports, sends, skips, saves and refuses."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fmlab import RankError, Ranks
from fmlab.meter import traffic
from fmlab.models import ResNet
from fmlab.models.resnet import ResNetConfig
from fmlab.parallel import Layout
from fmlab.parallel.ddp import Event, Timeline, expected_payload, plan_buckets, ring_bytes
from tests.parallel import common

multirank = pytest.mark.multirank
Sent = tuple[dict[str, tuple[int, int]], int, dict[str, int]]  # calls and bytes, gradient bytes, formula
ROWS = common.tokens(12, [12, 3, 7, 1, 5, 12, 2, 9, 4, 4, 11, 6])


def one_step(layout: Layout, **options: object) -> tuple[float, int, float]:
    torch.manual_seed(0)
    engine = common.engine(layout.data, common.gpt().double(), micro_batches=layout.micro_batches, **options)
    rank = dist.get_rank() if dist.is_initialized() else 0
    result = engine.step(layout.split(ROWS, rank))
    engine.close()
    return result.loss, result.count, result.grad_norm


@multirank
def test_loss_and_norm_do_not_depend_on_accumulation_or_ranks(ranks2: Ranks, ranks4: Ranks) -> None:
    loss, count, norm = one_step(Layout())
    assert count == 76
    assert loss == pytest.approx(math.log(common.VOCABULARY), rel=0.02)
    runs = [one_step(Layout(micro_batches=3))]
    runs += ranks2.run(one_step, Layout(data=2, micro_batches=3))
    runs += ranks4.run(one_step, Layout(data=4, micro_batches=1))
    runs += ranks4.run(one_step, Layout(data=4), choice="torch")
    for run in runs:
        assert run == (pytest.approx(loss, rel=1e-12), count, pytest.approx(norm, rel=1e-12))


# --- communication ---


def measured_traffic(
    choice: str, micro_batches: int
) -> tuple[dict[str, tuple[int, int]], int, dict[str, int]]:
    engine = common.engine(2, choice=choice, micro_batches=micro_batches, bucket_mb=0.02)
    batches = Layout(data=2, micro_batches=micro_batches).split(ROWS, dist.get_rank())
    engine.step(batches)  # the first step also agrees on the names of the terms
    with traffic() as sent:
        engine.step(batches)
    engine.close()
    gradients = sum(call.bytes for call in sent.calls if call.bytes > 1000)
    return sent.by_op(), gradients, expected_payload(engine.model)


@multirank
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_payload_is_exactly_the_formula(ranks2: Ranks, micro_batches: int) -> None:
    buckets = len(plan_buckets(dict(common.gpt().named_parameters()), 0.02 * 2**20))
    assert buckets > 2
    for by_op, gradients, expected in ranks2.run(measured_traffic, "fmlab", micro_batches):
        assert by_op == {"all_reduce": (buckets + 2, expected["total"])}
        assert gradients == expected["gradients"] == 4 * common.gpt().num_parameters()
    for by_op, gradients, expected in ranks2.run(measured_traffic, "torch", micro_batches):
        assert by_op["all_reduce"][1] == expected["total"]
        assert gradients == expected["gradients"]


def recorded_step() -> tuple[list[tuple[str, int]], int, int]:
    engine = common.engine(2, bucket_mb=0.01, micro_batches=2)
    timeline = engine.record_next_step()  # type: ignore[attr-defined]
    engine.step(Layout(data=2, micro_batches=2).split(ROWS, dist.get_rank()))
    engine.close()
    order = [(e.kind, e.bucket) for e in timeline.events if e.kind in ("gradient", "sent", "backward done")]
    return order, timeline.sent_before_last_gradient, len(timeline.of("arrived"))


@multirank
def test_buckets_are_sent_in_order_before_the_last_gradient_is_there(ranks2: Ranks) -> None:
    for order, before_last, arrived in ranks2.run(recorded_step):
        sent = [bucket for kind, bucket in order if kind == "sent"]
        assert sent == list(range(len(sent)))
        assert arrived == len(sent) > 3
        first_sent = order.index(("sent", 0))
        last_gradient = max(i for i, (kind, _) in enumerate(order) if kind == "gradient")
        assert first_sent < last_gradient
        assert before_last >= len(sent) - 1
        assert sum(kind == "gradient" for kind, _ in order) == len(list(common.gpt().parameters()))


def test_bucket_plan() -> None:
    sizes = {"a": 10, "b": 300, "c": 20, "d": 30, "e": 5}
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    assert plan_buckets(parameters, 4 * 60) == [["e", "d", "c"], ["b"], ["a"]]
    parameters["d"] = nn.Parameter(torch.zeros(30, dtype=torch.bfloat16))
    assert plan_buckets(parameters, 4 * 60) == [["e"], ["d"], ["c"], ["b"], ["a"]]


# --- what can go wrong in a step ---


def poisoned_step(choice: str) -> tuple[bool, float, bool, bool]:
    engine = common.engine(2, choice=choice, adamw=True, max_grad_norm=1.0)
    batches = Layout(data=2).split(ROWS, dist.get_rank())
    engine.step(batches)
    before = {name: p.clone() for name, p in engine.full_params().items()}
    state = {name: t.clone() for name, t in engine.full_optimizer_state().items()}
    rank = dist.get_rank()
    handle = engine.model.register_forward_hook(
        lambda module, args, out: out | {"loss_sum": out["loss_sum"] * (math.inf if rank == 1 else 1.0)}
    )
    result = engine.step(batches)
    handle.remove()
    same = all(torch.equal(p, before[name]) for name, p in engine.full_params().items())
    kept = all(torch.equal(t, state[name]) for name, t in engine.full_optimizer_state().items())
    assert not engine.step(batches).skipped  # and training goes on
    engine.close()
    return result.skipped, result.grad_norm, same, kept


@multirank
@pytest.mark.parametrize("choice", ["fmlab", "torch"])
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks2: Ranks, choice: str) -> None:
    for skipped, norm, same, kept in ranks2.run(poisoned_step, choice):
        assert skipped
        assert not math.isfinite(norm)
        assert same
        assert kept


def different_models() -> None:
    common.engine(2, nn.Linear(4, 4 + dist.get_rank()))


def batch_norm() -> None:
    common.engine(2, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def our_batch_norm() -> None:
    common.engine(2, ResNet(ResNetConfig((4,), (1,), "basic", stem_width=4)))


def thawed() -> None:
    model = common.gpt()
    model.blocks[1].requires_grad_(False)
    engine = common.engine(2, model)
    model.blocks[1].requires_grad_(True)
    try:
        engine.step(Layout(data=2).split(ROWS, dist.get_rank()))
    finally:
        engine.close()


def nothing_to_do() -> None:
    common.engine(2).step([])


@multirank
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (different_models, r"weight: \(4, 4\) .* on rank 0, \(5, 4\) .* on rank 1"),
        (batch_norm, "'1' is a BatchNorm1d"),
        (our_batch_norm, "'blocks.0.conv.norm' is a BatchNorm, whose statistics would differ"),
        (thawed, "make a new engine after thawing"),
        (nothing_to_do, "no rank has a micro-batch"),
    ],
)
def test_refused_on_every_rank_without_a_hang(ranks2: Ranks, attempt: object, message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks2.run(attempt, timeout=20)  # type: ignore[arg-type]
    assert ranks2.run(lambda: 1) == [1, 1]


def fails_on_rank_1() -> None:
    engine = common.engine(2)
    if dist.get_rank() == 1:
        engine.model.register_forward_hook(lambda *_: 1 / 0)
    engine.step(Layout(data=2).split(ROWS, dist.get_rank()))


@multirank
def test_model_error_on_one_rank_ends_the_call_and_names_the_rank(ranks2: Ranks) -> None:
    with pytest.raises(RankError, match="division by zero") as error:
        ranks2.run(fails_on_rank_1, timeout=30)
    assert error.value.rank == 1
    if not ranks2.alive:
        ranks2.restart()


def drift() -> tuple[list[str], list[str]]:
    engine = common.engine(2)
    before = engine.differing_replicas()  # type: ignore[attr-defined]
    if dist.get_rank() == 1:
        with torch.no_grad():
            engine.model.blocks[2].mlp.up.bias[0] += 1e-6
    after = engine.differing_replicas()  # type: ignore[attr-defined]
    engine.close()
    return before, after


@multirank
def test_replicas_start_equal_and_a_drift_is_named(ranks2: Ranks) -> None:
    assert ranks2.run(drift) == [([], ["blocks.2.mlp.up.bias"])] * 2


def one_model_in_turn() -> list[float]:
    torch.manual_seed(5)
    model, losses = common.gpt().double(), []
    layout = Layout(data=dist.get_world_size()) if dist.is_initialized() else Layout()
    for choice in ("torch", "fmlab", "torch", "fmlab"):
        engine = common.engine(layout.data, model, choice)
        losses += [engine.step(layout.split(ROWS, dist.get_rank() if layout.data > 1 else 0)).loss]
        engine.close()
    return losses


@multirank
def test_a_closed_engine_leaves_the_model_to_the_next(ranks2: Ranks) -> None:
    alone = one_model_in_turn()
    for losses in ranks2.run(one_model_in_turn):
        assert losses == pytest.approx(alone, rel=1e-12)


# --- state ---


def train_and_save(
    folder: str, steps: int, load: str = "", micro_batches: int = 1
) -> dict[str, torch.Tensor]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout(data=world, micro_batches=micro_batches)
    if not load:
        torch.manual_seed(3)
    engine = common.engine(world, common.gpt().double(), adamw=True)
    if load:
        engine.load(load)
    for _ in range(steps):
        engine.step(layout.split(ROWS, dist.get_rank() if world > 1 else 0))
    if folder:
        engine.save(folder)
    engine.close()
    return {**engine.full_params(), **engine.full_optimizer_state()}


@multirank
def test_state_saved_on_any_number_of_ranks_goes_on_on_any_other(
    ranks2: Ranks, ranks4: Ranks, tmp_path: Path
) -> None:
    straight = train_and_save("", steps=4)
    train_and_save(str(tmp_path / "one"), steps=1)
    ranks2.run(train_and_save, str(tmp_path / "two"), 1, str(tmp_path / "one"))
    ranks4.run(train_and_save, str(tmp_path / "four"), 1, str(tmp_path / "two"), 3)
    resumed = train_and_save("", 1, str(tmp_path / "four"))
    assert straight.keys() == resumed.keys()
    assert any(name.endswith("/exp_avg_sq") for name in straight)
    for name, tensor in straight.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-8, atol=1e-12)


@multirank
def test_saving_into_a_folder_that_exists_fails_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exists already"):
        ranks2.run(train_and_save, str(tmp_path), 1)


def test_loading_what_does_not_fit_names_the_parameters_and_changes_nothing(tmp_path: Path) -> None:
    common.engine(1, nn.Linear(4, 3)).save(tmp_path / "a")
    other = common.engine(1, nn.Sequential(nn.Linear(4, 3)))
    before = other.full_params()["0.weight"].clone()
    with pytest.raises(ValueError, match=r"missing: 0.bias, 0.weight; unknown: bias, weight"):
        other.load(tmp_path / "a")
    assert torch.equal(before, other.full_params()["0.weight"])
    with pytest.raises(ValueError, match=r"weight is \(3, 4\), the model has \(3, 5\)"):
        common.engine(1, nn.Linear(5, 3)).load(tmp_path / "a")


# --- layout ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Layout(data=0), "1 or more"),
        (lambda: Layout(precision="fp8"), "legal are fp32, bf16"),
        (lambda: Layout(bucket_mb=0), "above 0"),
        (lambda: Layout(data=2).validate(4), "set data=4"),
        (lambda: Layout(data=2, micro_batches=3).validate(2, 10), r"use 6 or 12 rows"),
        (lambda: Layout(data=4).validate(4, 6), r"use 4 or 8 rows, or data in \[1, 2, 3, 6\]"),
        (lambda: Layout(data=2).split(ROWS, 2), "legal are 0 to 1"),
        (lambda: common.engine(1, choice="horovod"), "legal are fmlab, torch"),
        (lambda: common.engine(1, max_grad_norm=0.0), "above 0"),
        (lambda: common.engine(1, common.gpt().requires_grad_(False)), "nothing to train"),
    ],
)
def test_illegal_settings_are_refused_with_the_legal_ones(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


# --- cost and timeline ---


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Embedding(5, 2, sparse=True)), "'0' is a Embedding with sparse=True"),
        (nn.ParameterList([torch.ones(2, dtype=torch.complex64)]), "'0' is complex"),
    ],
)
def test_gradients_that_are_not_plain_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        common.engine(1, model)


def test_hidden_share_is_the_part_of_the_wire_time_inside_the_backward_pass() -> None:
    moments = [("sent", 1.0, 0), ("sent", 2.0, 1), ("sent", 6.0, 2), ("arrived", 3.0, 0), ("arrived", 4.0, 1)]
    moments += [("arrived", 9.0, 2), ("gradient", 1.0, 0), ("gradient", 6.0, 2), ("backward done", 7.0, -1)]
    timeline = Timeline([Event(kind, seconds, bucket) for kind, seconds, bucket in moments])  # type: ignore[arg-type]
    assert timeline.hidden_share == pytest.approx((3 + 1) / (3 + 3))  # 1..4 and 6..7 of 1..4 and 6..9
    assert timeline.sent_before_last_gradient == 2


def test_ring_formula() -> None:
    assert [ring_bytes("all_reduce", 1200, n) for n in (1, 2, 4)] == [0, 1200, 1800]
    assert ring_bytes("all_gather", 1200, 4) == ring_bytes("reduce_scatter", 1200, 4) == 900
    with pytest.raises(ValueError, match="legal are all_reduce, all_gather, reduce_scatter"):
        ring_bytes("broadcast", 1200, 4)


class Reentrant(nn.Module):
    """Uses one layer in two checkpointed segments, whose gradients arrive one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor, branch: Tensor) -> Tensor:
        h = self.stem(x)
        for _ in range(2):
            h = checkpoint(self.layer, h, use_reentrant=True)
        return nn.functional.cross_entropy(h, y, reduction="sum")


def reentrant_step() -> None:
    engine = common.engine(2, Reentrant(), objective=common.Classify())
    try:
        engine.step([common.rows(3, 0, dist.get_rank())])
    finally:
        engine.close()


@multirank
def test_a_gradient_that_comes_after_its_bucket_was_full_is_an_error(ranks2: Ranks) -> None:
    with pytest.raises(RankError, match=r"'\w+\.\w+' came twice .* use_reentrant=False"):
        ranks2.run(reentrant_step, timeout=20)
    if not ranks2.alive:
        ranks2.restart()
