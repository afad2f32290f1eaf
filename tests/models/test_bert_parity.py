"""BERT, RoBERTa and DistilBERT against transformers on random weights: results, losses, every gradient."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmlab.models import BERT, check_plan
from tests.models.bert_reference import MODELS, labels_for, padded_batch, small, transformers_twin, weights
from tests.models.reference import assert_same_gradients, tokens

#: Our name of a result -> the names that transformers' classes have for it.
RESULTS = {
    "hidden": ("last_hidden_state",),
    "pooled": ("pooler_output",),
    "logits": ("prediction_logits", "logits"),
    "sentence_logits": ("seq_relationship_logits",),
    "class_logits": ("logits",),
}
LOSSES = {"labels": "loss_sum", "sentence_labels": "sentence_loss_sum", "class_labels": "class_loss_sum"}
THEIR_LABELS = {"labels": "labels", "sentence_labels": "next_sentence_label", "class_labels": "labels"}


def mean_loss(model: BERT, batch: dict[str, Tensor], labels: dict[str, Tensor]) -> Tensor:
    """The sum over heads of each head's mean loss, as transformers has it."""
    state = model(**batch, **labels)
    parts = [state[LOSSES[name]] / (given != -100).sum() for name, given in labels.items()]
    return torch.stack(parts).sum()


def their_loss(model: BERT, twin: nn.Module, batch: dict[str, Tensor], labels: dict[str, Tensor]) -> Tensor:
    return twin(**batch, **{THEIR_LABELS[name]: given for name, given in labels.items()}).loss


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("family", "heads"), MODELS)
def test_results_losses_and_every_gradient_equal_transformers(family: str, heads: str, padded: bool) -> None:
    model = small(family, heads)
    twin = transformers_twin(model)
    # Unpadded ids hold the padding id here and there: its look-ups learn nothing, but it is seen.
    batch = padded_batch(family) if padded else {"input_ids": tokens(3, 33)}
    ours, theirs = model(**batch), twin(**batch)
    compared = 0
    for name, names in RESULTS.items():
        found = [n for n in names if n in theirs]
        if name in ours and found and (name != "logits" or "labels" in model.config.learns_from):
            torch.testing.assert_close(ours[name], theirs[found[0]], rtol=0, atol=1e-5)
            compared += 1
    assert compared == {"encoder": 1, "masked": 1, "classifier": 1, "pooled": 2, "pretraining": 2}[heads]

    if labels := labels_for(model, batch):
        loss, wanted = mean_loss(model, batch, labels), their_loss(model, twin, batch, labels)
        assert abs(loss.item() - wanted.item()) < 1e-6 * wanted.item()
    else:  # what a fine-tuning would send back
        loss, wanted = (
            o.square().sum()
            for o in (ours.get("pooled", ours.hidden), theirs[-1] if heads == "pooled" else theirs[0])
        )
    loss.backward()
    wanted.backward()
    assert_same_gradients(model, twin, weights(model))


@pytest.mark.parametrize(("family", "heads"), [m for m in MODELS if m[1] not in ("encoder", "pooled")])
def test_dropout_is_where_transformers_has_it(family: str, heads: str) -> None:
    """The same draws in the same order give the same numbers only if every dropout sits in the same place."""
    model = small(family, heads, dropout=0.3, classifier_dropout=0.2)
    twin = transformers_twin(model).train()
    batch = {"input_ids": tokens(3, 20).clamp(min=2)}
    labels = labels_for(model, batch)
    torch.manual_seed(3)
    loss = mean_loss(model.train(), batch, labels)
    torch.manual_seed(3)
    wanted = their_loss(model, twin, batch, labels)
    assert abs(loss.item() - wanted.item()) < 1e-5 * wanted.item()
    assert abs(loss.item() / mean_loss(model.eval(), batch, labels).item() - 1) > 1e-4


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_the_loss_path_equals_the_logits_path(family: str) -> None:
    model = small(family).double()
    batch = padded_batch(family)
    labels = labels_for(model, batch)["labels"]
    logits = model(**batch).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    want = torch.autograd.grad(expected, list(model.parameters()))
    loss = model(**batch, labels=labels).loss_sum
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss, list(model.parameters())), want, rtol=1e-10, atol=1e-13
    )


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_a_batch_without_labels_gives_zero_loss_and_zero_gradients(family: str) -> None:
    model = small(family, "pretraining" if family == "bert" else "masked")
    batch = padded_batch(family)
    labels = {name: torch.full_like(t, -100) for name, t in labels_for(model, batch).items()}
    state = model(**batch, **labels)
    loss = torch.stack([state[LOSSES[name]] for name in labels]).sum()
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_padding_changes_nothing_for_real_tokens() -> None:
    for family in ("bert", "roberta", "distilbert"):
        model = small(family, "encoder").eval()
        batch = padded_batch(family)
        alone = {name: tensor[1:2, :12] for name, tensor in batch.items()}
        torch.testing.assert_close(model(**batch).hidden[1, :12], model(**alone).hidden[0])
        assert model(**batch).hidden.isfinite().all()


def test_bf16_autocast_errs_no_more_than_twice_what_transformers_does() -> None:
    off = {"ours": 0.0, "theirs": 0.0}  # squared errors of the loss: a single one can be small by chance
    for seed in range(4):
        model = small("bert", "pretraining", seed, hidden_size=64, num_heads=4, vocab_size=509)
        twin = transformers_twin(model)
        batch = {"input_ids": tokens(4, 24, vocab=509, seed=seed)}
        labels = labels_for(model, batch)
        exact = copy.deepcopy(model).double()
        truth = mean_loss(exact, batch, labels)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = mean_loss(model, batch, labels), their_loss(model, twin, batch, labels)
        off["ours"] += (ours - truth).item() ** 2
        off["theirs"] += (theirs - truth).item() ** 2
    assert off["ours"] ** 0.5 <= 2 * off["theirs"] ** 0.5
    for loss in (truth, ours, theirs):
        loss.backward()
    for weight in weights(model):
        reference = exact.get_parameter(weight.ours).grad
        mine = model.get_parameter(weight.ours).grad
        other = weight.join([twin.get_parameter(name).grad for name in weight.names])
        assert mine.dtype == torch.float32
        assert (mine - reference).norm() <= 2 * (other - reference).norm() + 1e-6 * reference.norm()


@pytest.mark.parametrize(("family", "heads"), [("bert", "pretraining"), ("roberta", "classifier")])
def test_a_training_step_is_captured_as_one_graph(family: str, heads: str) -> None:
    model = small(family, heads, num_layers=1).double()
    batch = padded_batch(family)
    labels = labels_for(model, batch)

    def loss(**inputs: Tensor) -> Tensor:
        state = model(**inputs)
        return torch.stack([state[LOSSES[name]] for name in labels]).sum()

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises at a graph break
    got = torch.autograd.grad(captured(**batch, **labels), list(model.parameters()))
    want = torch.autograd.grad(loss(**batch, **labels), list(model.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["plain", "labelled", "padded"])
@pytest.mark.parametrize(("family", "heads"), MODELS)
def test_the_plan_holds(family: str, heads: str, kind: str) -> None:
    model = small(family, heads)
    batch: dict[str, Any] = padded_batch(family)
    labels = labels_for(model, batch)
    check_plan(
        model, {"plain": {"input_ids": tokens(2, 9)}, "labelled": batch | labels, "padded": batch}[kind]
    )


def test_every_result_is_on_the_last_stage_of_a_pipeline() -> None:
    model = small("bert", "pretraining").eval()
    batch = padded_batch("bert")
    blocks = list(model.blocks)
    for cut in model.parallel_plan().cuts:
        written = {name for block in blocks[cut:] for name in block.writes}
        assert {"logits", "loss_sum", "sentence_logits", "sentence_loss_sum", "pooled"} <= written
    assert {"hidden", "pooled", "logits", "sentence_logits"} <= set(model(**batch))
