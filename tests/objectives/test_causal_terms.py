"""Loss terms: labels by hand, and the mean over unequal micro-batches equals the mean over all tokens."""

import pytest
import torch
from torch.nn import functional as F

from fmlab.objectives import CausalLM, Term, shift_labels, total_loss


class TinyModel(torch.nn.Module):
    def __init__(self, vocab: int = 7) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(0)))

    def forward(self, input_ids, labels=None, attention_mask=None, document_ids=None):
        logits = self.table[input_ids]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return {"loss_sum": loss}


def test_labels_are_the_next_token_and_never_cross_a_border_or_a_pad():
    ids = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 3, 4, 5], [1, 2, 3, 4, 0]])
    assert shift_labels(ids)[0].tolist() == [2, 3, 4, 5, -100]
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    docs = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    assert shift_labels(ids, mask, docs).tolist() == [
        [2, 3, -100, 5, -100],
        [-100, -100, 4, 5, -100],
        [-100, 3, 4, -100, -100],
    ]
    assert ids[0].tolist() == [1, 2, 3, 4, 5], "the input must not change"


def test_unequal_micro_batches_give_the_mean_over_all_tokens():
    model, objective = TinyModel(), CausalLM()
    ids = torch.randint(0, 7, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0  # micro-batch 0 has far fewer targets than micro-batch 1
    micro = [{"input_ids": ids[i : i + 2], "attention_mask": mask[i : i + 2]} for i in (0, 2)]
    counts = {"causal": sum(objective.counts(batch)["causal"] for batch in micro)}
    losses = [total_loss(objective(model, batch), counts) for batch in micro]
    sum(losses).backward()
    got = model.table.grad.clone()

    model.table.grad = None
    labels = shift_labels(ids, mask)
    F.cross_entropy(model.table[ids].flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(got, model.table.grad, rtol=1e-5, atol=1e-7)
    assert int(counts["causal"]) == 2 + 8 * 3


def test_counts_need_no_forward_and_agree_with_the_terms():
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, -100, -100]])}
    objective = CausalLM()
    assert int(objective.counts(batch)["causal"]) == 1
    assert int(objective(TinyModel(), batch)["causal"].count) == 1


def test_weights_zero_counts_and_missing_counts():
    terms = {
        "a": Term(torch.tensor(6.0), torch.tensor(3), weight=2.0),
        "b": Term(torch.tensor(0.0), torch.tensor(0)),
    }
    assert total_loss(terms, {"a": 3, "b": torch.tensor(0)}).item() == pytest.approx(4.0)
    with pytest.raises(ValueError, match=r"\['b'\]"):
        total_loss(terms, {"a": 3})
    with pytest.raises(ValueError, match="at least one"):
        total_loss({}, {})
