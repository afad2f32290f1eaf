"""Expert parallelism: experts on several ranks equal one device; and parity finds what breaks them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fmlab import RankError, Ranks
from fmlab.meter import traffic
from fmlab.models import GPT
from fmlab.models.mixtral import Mixtral
from fmlab.models.moe import count_alone, grouped_experts
from fmlab.objectives import CausalLM, ExpertsCausalLM
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.expert.cost import dispatch_bytes
from fmlab.parallel.expert.dispatch import DispatchCore, by_expert
from fmlab.parallel.mesh import Mesh

multirank = pytest.mark.multirank
HEAVY = ExpertsCausalLM(balance=0.5, router_z=0.1)  # so that an error in them shows


def mixtral(**config: Any) -> Mixtral:
    sizes = dict(vocab_size=131, num_layers=2, hidden_size=32, ffn_size=24)
    return Mixtral.from_preset("mixtral-tiny", **(sizes | config))


def tied() -> Mixtral:
    return mixtral(tie_embeddings=True)


def batch(rows: int, seed: int = 0, padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(131, (rows, 12), generator=generator)
    if not padded:
        return {"input_ids": ids}
    real = torch.ones(rows, 12, dtype=torch.long)
    for row in range(rows):
        real[row, 12 - 2 * row :] = 0
    return {"input_ids": ids, "attention_mask": real}


def test_arrivals_are_sorted_by_expert_then_rank() -> None:
    # from rank 0: one pair for expert 0, two for expert 1; from rank 1: one for each
    assert by_expert(torch.tensor([[1, 2], [1, 1]])).tolist() == [0, 3, 1, 2, 4]


def _core_error(tokens: list[int]) -> float:
    """Largest difference of result and gradients from all experts at home; ranks have unequal tokens."""
    axis = Mesh(Layout(data=2, expert=2).grid()).axis("expert")
    torch.manual_seed(5)
    gate_up, down = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 6, 5), (4, 5, 3)))
    torch.manual_seed(axis.rank)
    x = torch.randn(tokens[axis.rank], 5, dtype=torch.float64)
    expert = torch.randint(0, 5, (len(x), 2))  # 4: nobody, for want of a seat
    expert[:, 1] = (expert[:, 0] + 1) % 4
    weight = torch.rand(len(x), 2, dtype=torch.float64)
    mine = slice(2 * axis.rank, 2 * axis.rank + 2)
    found = [t.clone().requires_grad_() for t in (x, weight, gate_up[mine], down[mine])]
    got = DispatchCore(axis)(found[0], expert, found[1], found[2], found[3], torch.sin)
    got.square().sum().backward()
    wanted = [t.clone().requires_grad_() for t in (x, weight, gate_up, down)]
    right = grouped_experts(wanted[0], expert, wanted[1], wanted[2], wanted[3], torch.sin)
    right.square().sum().backward()
    for whole in wanted[2:]:  # the tokens of both ranks
        dist.all_reduce(whole.grad)
    pairs = [(got, right), *((a.grad, b.grad) for a, b in zip(found[:2], wanted[:2], strict=True))]
    pairs += [(a.grad, b.grad[mine]) for a, b in zip(found[2:], wanted[2:], strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


@multirank
@pytest.mark.parametrize("tokens", [[7, 4], [0, 9], [0, 0]])
def test_core_equals_all_experts_at_home(ranks2: Ranks, tokens: list[int]) -> None:
    assert max(ranks2.run(_core_error, tokens)) < 1e-13


@multirank
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_two_ranks_with_all_losses(ranks2: Ranks, precision: str) -> None:
    for layout in (Layout(data=2), Layout(data=2, expert=2), Layout(context=2)):
        report = parity(
            mixtral,
            layout,
            batches=[batch(4, 0, padded=True), batch(4, 1)],
            precision=precision,
            objective=HEAVY,
            max_grad_norm=0.1,
            ranks=ranks2,
        )
        report.raise_if_different()
        assert len(report.rows) == len(list(mixtral().named_parameters()))


@multirank
def test_four_ranks_and_other_strategies(ranks4: Ranks) -> None:
    for settings in (
        dict(data=4, expert=2),
        dict(data=4, expert=4),
        dict(data=4, expert=2, zero=1),
        dict(data=4, expert=2, zero=3),
        dict(data=4, expert=2, fsdp=True),
        dict(data=2, expert=2, tensor=2),
        dict(data=2, expert=2, context=2),
    ):
        report = parity(
            tied, Layout(**settings), precision="fp64", objective=HEAVY, max_grad_norm=0.1, ranks=ranks4
        )
        report.raise_if_different()


@multirank
def test_ranks_without_tokens_or_micro_batches(ranks2: Ranks) -> None:
    by_rank = [[batch(2), batch(3, 1)], []]
    plain = ExpertsCausalLM(balance=0)
    report = parity(
        mixtral, Layout(data=2, expert=2), batches=[by_rank], precision="fp64", objective=plain, ranks=ranks2
    )
    report.raise_if_different()
    assert report.targets[1] == 0


def _with_capacity(expert: int) -> tuple[float, float, dict[str, Tensor], int]:
    torch.manual_seed(0)
    model = mixtral(capacity_factor=0.75)
    dropped = []
    model.blocks[-1].register_forward_pre_hook(lambda _, inputs: dropped.append(inputs[0]["dropped_count"]))
    engine = parallelize(
        model,
        Layout(data=2, expert=expert),
        ExpertsCausalLM(),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    result = engine.step([batch(2, seed=dist.get_rank())])
    gradients = engine.full_grads()
    engine.close()
    return result.loss, result.grad_norm, gradients, int(dropped[0])


@multirank
def test_capacity_is_that_of_each_ranks_tokens_wherever_experts_are(ranks2: Ranks) -> None:
    (loss, norm, gradients, dropped), *_ = ranks2.run(_with_capacity, 1)
    (loss_2, norm_2, gradients_2, dropped_2), *_ = ranks2.run(_with_capacity, 2)
    assert dropped == dropped_2 > 0
    assert (loss, norm) == pytest.approx((loss_2, norm_2), rel=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, gradients_2[name], atol=1e-6), name


def _step_traffic() -> tuple[int, int]:
    engine = parallelize(
        mixtral(), Layout(data=2, expert=2), CausalLM(), lambda n: torch.optim.SGD([p for _, p in n])
    )
    mine = [batch(3, seed=dist.get_rank())]
    engine.step(mine)
    with traffic() as sent:
        engine.step(mine)
    engine.close()
    mean = torch.tensor(float(sent.bytes("all_to_all")))
    dist.all_reduce(mean)
    return int(mean) // 2, sent.bytes("all_to_all", dtype="int64")


@multirank
def test_what_is_sent_is_what_the_formula_says(ranks2: Ranks) -> None:
    config = mixtral().config
    pairs = 3 * 12 * config.experts_per_token
    expected = dispatch_bytes(pairs, 32, 2, 4, config.num_experts, mixtures=2)
    for mean, counts in ranks2.run(_step_traffic):
        # a rank's payload depends on its experts' luck, the mean over ranks does not
        assert (mean, counts) == (expected["total"], expected["counts"])


# ---- what breaks -------------------------------------------------------------------------------------------


class TimesTheDegree(Composed):
    """Wrong: the gradient of divided experts is as many times too large as they are divided."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> Tensor:
        sums = super()._accumulate(micro_batches, counts)
        for name, gradient in self.ledger.gradients().items():
            if self.ledger.entries[name].cuts:
                gradient *= self.layout.expert
        return sums


class SummedLikeCopies(Composed):
    """Wrong: gradients of different experts are added up."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> Tensor:
        sums = super()._accumulate(micro_batches, counts)
        for name, gradient in self.ledger.gradients().items():
            if self.ledger.entries[name].cuts:
                self.mesh.axis("expert").all_reduce_(gradient)
        return sums


class NormOfOneRanksExperts(Composed):
    """Wrong: the norm, and so the clipping, leaves out the experts of other ranks."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        ledger.norm = lambda g: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(g.values()))))
        return ledger


class BalancesItsOwnTokens(Composed):
    """Wrong: each rank counts the choices of its own tokens."""

    def _divide(self, ledger: Any) -> Any:
        ledger = super()._divide(ledger)
        self.model.blocks[-1].counts_of_all = count_alone
        return ledger


@multirank
@pytest.mark.parametrize(
    "broken", [TimesTheDegree, SummedLikeCopies, NormOfOneRanksExperts, BalancesItsOwnTokens]
)
def test_what_breaks_is_found(ranks2: Ranks, broken: type[Composed]) -> None:
    report = parity(
        mixtral, Layout(data=2, expert=2), broken, objective=HEAVY, max_grad_norm=0.1, ranks=ranks2
    )
    assert not report.ok
    wrong = {row.name for row in report.different}
    experts = {row.name for row in report.rows if row.name.endswith(("gate_up", "down"))}
    if broken is TimesTheDegree:
        assert "gradient norm: DIFFERS" in str(report)
    elif broken is BalancesItsOwnTokens:
        assert {name for name in wrong if "router" in name}
    assert experts & wrong or broken is BalancesItsOwnTokens


@multirank
def test_what_cannot_be_is_refused(ranks2: Ranks) -> None:
    with pytest.raises((RankError, ValueError), match=r"expert=2 does not divide 3 experts|the 3 of"):
        parity(lambda: mixtral(num_experts=3), Layout(data=2, expert=2), ranks=ranks2)
    with pytest.raises((RankError, ValueError), match="GPT has no"):
        parity(lambda: GPT.from_preset("gpt2-tiny"), Layout(data=2, expert=2), ranks=ranks2)
    with pytest.raises((RankError, ValueError), match="compare with balance=0"):
        parity(mixtral, Layout(data=2, micro_batches=2, expert=2), objective=HEAVY, ranks=ranks2)
    with pytest.raises((RankError, ValueError), match="which tokens find a seat"):
        parity(lambda: mixtral(capacity_factor=1.0), Layout(data=2, expert=2), ranks=ranks2)
