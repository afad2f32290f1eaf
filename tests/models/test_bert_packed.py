"""Packed rows of an encoder: each document gets the losses and gradients that it has alone."""

import numpy as np
import pytest
import torch

from fmlab.data import Corpus, MaskedSampler, WordPiece, encode, pack
from fmlab.models import BERT, DistilBERT, RoBERTa

SHAPE = dict(vocab_size=60, num_layers=2, hidden_size=16, num_heads=2, heads="masked")


def documents(seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    random = np.random.default_rng(seed)
    ids = [[2, *random.integers(5, 60, n).tolist(), 3] for n in (3, 9, 4, 12, 6, 2)]
    return ids, [[i if n % 3 == 1 else -100 for n, i in enumerate(row)] for row in ids]


@pytest.mark.parametrize("family", [BERT, RoBERTa, DistilBERT])
def test_packed_documents_have_the_loss_and_the_gradients_they_have_alone(family: type[BERT]) -> None:
    torch.manual_seed(0)
    model = family(family.CONFIG(**SHAPE, max_positions=20)).double()
    ids, labels = documents()
    pad = model.config.pad_token or 0
    packed = pack(ids, 18, pad, labels)
    rows = {name: t for name, t in packed.batch.items() if name != "position_ids"}
    assert len(rows["input_ids"]) < len(ids)
    together = model(**rows)["loss_sum"]
    together.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = sum(
        model(torch.tensor([row]), torch.tensor([targets]))["loss_sum"]
        for row, targets in zip(ids, labels, strict=True)
    )
    alone.backward()
    assert together.item() == pytest.approx(alone.item(), rel=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-12)
    # Without the borders the documents read each other, which is what this test must be able to see.
    leaking = model(rows["input_ids"], rows["labels"])["loss_sum"]
    assert abs(leaking.item() - alone.item()) > 1e-3 * alone.item()


def test_rows_that_hold_several_documents_have_no_label_of_a_row_and_no_document_beyond_the_positions() -> (
    None
):
    model = BERT(BERT.CONFIG(**(SHAPE | dict(heads="classifier")), max_positions=8))
    ids, two = torch.full((1, 12), 7), torch.tensor([[0] * 6 + [1] * 6])
    with pytest.raises(ValueError, match=r"class_labels speak of a row, and document_ids put several"):
        model(ids, document_ids=two, class_labels=torch.tensor([1]))
    assert model(ids, document_ids=two)["hidden"].shape == (1, 12, 16)  # 12 tokens, of which none is beyond
    for other in (model, RoBERTa(RoBERTa.CONFIG(**SHAPE, max_positions=10))):
        with pytest.raises(ValueError, match="position 11 is beyond the model's 8 positions"):
            other(ids, document_ids=torch.zeros_like(two))


def test_the_sampler_numbers_the_documents_of_its_rows() -> None:
    corpus = Corpus("two", ["one two three " * 3, "four five " * 4, "six " * 30], "")
    tokenizer = WordPiece.train(corpus.documents, 60)
    tokens = encode(corpus, tokenizer)
    sampler = MaskedSampler(tokens, tokenizer, 16, 2, packed=True, versions=1)
    for batch in sampler.evaluation():
        for row, numbers in zip(batch["input_ids"], batch["document_ids"], strict=True):
            real = row != tokenizer.pad
            assert (numbers[~real] == tokens.num_documents).all()
            closing = (row == tokenizer.sep).nonzero().flatten().tolist()[:-1]
            changes = (numbers[real].diff() != 0).nonzero().flatten().tolist()
            assert set(changes) <= set(closing), "a document begins behind the [SEP] of the one before it"
    assert "document_ids" not in MaskedSampler(tokens, tokenizer, 16, 2).batch(0)
