"""The terms of a mixture of experts: means over the right tokens, and a router that learns to spread them."""

import pytest
import torch

from fmlab.models.mixtral import Mixtral, MixtralConfig
from fmlab.objectives.experts import ExpertsCausalLM
from fmlab.objectives.terms import total_loss
from fmlab.parallel import Layout, parity


def test_the_terms_are_counted_and_training_evens_out_the_experts() -> None:
    torch.manual_seed(0)
    model = Mixtral(MixtralConfig(50, 32, 1, 16, 2, 16, num_experts=4, experts_per_token=1))
    with torch.no_grad():
        model.blocks[0].tokens.weight.normal_().add_(1.0)  # what all tokens share ...
        model.get_parameter("blocks.1.mlp.router.weight")[0] += 1.0  # ... sends them to one expert
    batch = {
        "input_ids": torch.randint(0, 50, (4, 32)),
        "attention_mask": (torch.arange(32) < 30).long().expand(4, 32),
    }
    objective = ExpertsCausalLM(balance=1.0, router_z=0.01)
    counts = objective.counts(batch)
    assert {name: int(count) for name, count in counts.items()} == {
        "causal": 4 * 29,
        "balance": 120,
        "router_z": 120,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    balances = []
    for _ in range(30):
        terms = objective(model, batch)
        assert all(torch.equal(terms[name].count, counts[name]) for name in counts)
        balances.append(terms["balance"].sum.item() / 120)
        total_loss(terms, counts).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert balances[0] > 2
    assert balances[-1] < 1.2  # 1 if all is even, 4 if one expert has everything


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        ExpertsCausalLM(balance=-0.1)


@pytest.mark.parametrize(
    ("objective", "capacity", "reason"),
    [
        (ExpertsCausalLM(), None, "balance of the experts is that of one forward pass"),
        (ExpertsCausalLM(balance=0), 1.0, "which tokens find a seat depends on the others"),
    ],
)
def test_parity_of_what_a_cut_batch_changes_by_definition_is_refused(
    objective: ExpertsCausalLM, capacity: float | None, reason: str
) -> None:
    def build() -> Mixtral:
        return Mixtral(MixtralConfig(50, 32, 1, 16, 2, 16, num_experts=4, capacity_factor=capacity))

    with pytest.raises(ValueError, match=reason):
        parity(build, Layout(micro_batches=2), objective=objective)
    if capacity is None:
        report = parity(
            build, Layout(micro_batches=2), objective=ExpertsCausalLM(balance=0), precision="fp64"
        )
        report.raise_if_different()
