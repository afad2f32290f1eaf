"""What breaks context parallelism is found, and what it cannot do is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fmlab import RankError, Ranks
from fmlab.models import GPT
from fmlab.models.attention import AttentionMask
from fmlab.objectives import CausalLM, shift_labels
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.context import RingCore, SequenceCut, ring
from fmlab.parallel.mesh import Mesh
from tests.parallel.test_context import build, padded_batch

multirank = pytest.mark.multirank

# ---- what breaks -------------------------------------------------------------------------------------------


class LabelsMadeAfterTheCut(Composed):
    """Wrong: the last token of each part has no target, or one that does not follow it."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        cut = self.build.batch_steps[0]

        def cut_first(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            part = cut(batch)
            return {**part, "labels": shift_labels(part["input_ids"])}

        self.build.batch_steps[0] = cut_first
        return ledger


class PositionsOfThePart(Composed):
    """Wrong: every part begins at position 0."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        cut = self.build.batch_steps[0]
        self.build.batch_steps[0] = lambda batch: {k: t for k, t in cut(batch).items() if k != "position_ids"}
        return ledger


class WithSwapped(Composed):
    """A function of the ring replaced while the step runs."""

    name_of: str
    wrong: Callable[..., Any]

    def step(self, micro_batches: Any) -> Any:
        kept = getattr(ring, self.name_of)
        setattr(ring, self.name_of, type(self).wrong)
        try:
            return super().step(micro_batches)
        finally:
            setattr(ring, self.name_of, kept)


class NotRescaled(WithSwapped):
    """Wrong: parts of the softmax are averaged as if their sums were equal."""

    name_of = "merge_"

    @staticmethod
    def wrong(mixed: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor) -> None:
        first = logsumexp.isneginf()[..., None]
        mixed.copy_(torch.where(first, part, (mixed + part) / 2))
        logsumexp.copy_(torch.logaddexp(logsumexp, part_logsumexp))


class GradientsStayBehind(WithSwapped):
    """Wrong: what a rank finds for another one's keys never gets there."""

    name_of = "_add_and_pass_on"

    @staticmethod
    def wrong(axis: Any, found: Tensor, behind: Any) -> Any:
        return axis.pass_on(torch.zeros_like(found))


@multirank
@pytest.mark.parametrize(
    "broken", [LabelsMadeAfterTheCut, PositionsOfThePart, NotRescaled, GradientsStayBehind]
)
def test_what_breaks_is_found(ranks2: Ranks, broken: type[Composed]) -> None:
    batches = [{"input_ids": padded_batch(0, False)["input_ids"]}]
    layout = Layout(context=2, context_balance="none")
    report = parity(partial(build, "gpt2-tiny"), layout, broken, batches=batches, ranks=ranks2)
    assert not report.ok
    loss_is_right = report.loss.ok
    assert loss_is_right == (broken is GradientsStayBehind)


@multirank
def test_what_cannot_be_cut_is_refused(ranks2: Ranks) -> None:
    with pytest.raises((RankError, ValueError), match="T5 cannot be divided along its sequences"):
        parity(partial(build, "t5-tiny"), Layout(context=2), ranks=ranks2)
    with pytest.raises(ValueError, match=r"cannot divide 2 query heads .* legal are \[1, 2\]"):
        parity(partial(build, "gpt2-tiny", num_heads=2), Layout(context=4, context_method="ulysses"))
    prefix = {**padded_batch(0, False), "prefix_lengths": torch.tensor([1, 1, 1, 1])}
    with pytest.raises(RankError, match="cannot cut 'prefix_lengths'"):
        parity(partial(build, "gpt2-tiny"), Layout(context=2), batches=[prefix], ranks=ranks2)


def _own_rows() -> None:
    engine = parallelize(
        build("gpt2-tiny"), Layout(context=2), CausalLM(), lambda n: torch.optim.SGD([p for _, p in n])
    )
    engine.step([padded_batch(dist.get_rank(), False)])


@multirank
def test_ranks_of_one_place_must_be_given_the_same_rows(ranks2: Ranks) -> None:
    with pytest.raises(RankError, match=r"all 2 ranks: .*one place .* 'input_ids' .* has other numbers"):
        ranks2.run(_own_rows)


def _order_of_work() -> list[str]:
    axis, order = Mesh(Layout(context=2).grid()).axis("context"), []
    pass_on, right = axis.pass_on, ring.attend
    axis.pass_on = lambda message: order.append("send") or pass_on(message)  # type: ignore[method-assign]
    ring.attend = lambda *args: order.append("compute") or right(*args)
    try:
        query, key, value = torch.randn(3, 1, 2, 4, 8)
        RingCore(axis, "none")(query, key, value, AttentionMask(False, 4, 4))
    finally:
        ring.attend = right
    return order


@multirank
def test_keys_are_on_their_way_before_the_ring_computes(ranks2: Ranks) -> None:
    assert ranks2.run(_order_of_work) == [["send", "compute", "compute"]] * 2


def test_positions_are_those_of_whole_rows() -> None:
    axis = Mesh(Layout().grid()).axis("context")
    model = GPT.from_preset("gpt2-tiny")
    cut = SequenceCut(model, model.parallel_plan(), CausalLM(), axis, "none")
    part = cut(padded_batch(0, True))
    assert part["position_ids"][1].tolist()[:9] == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    assert part["document_ids"][1].tolist() == [-1, -1, -1, -2, -2, -3, -3, -3, -4, -4, -4, -5, -5]


def test_the_panel_of_balances_says_who_waits() -> None:
    from fmlab.lab import balance_panel

    panel = balance_panel()
    assert panel.summary.endswith("14.7 million pairs on the critical path, ranks busy 57% of it")
    panel.set(balance="mirrored")
    assert panel.summary.endswith("8.4 million pairs on the critical path, ranks busy 100% of it")
