"""Span corruption as T5 publishes it: lengths, sentinel order, spans; and packing."""

import numpy as np
import pytest
import torch

from fmlab.data import SpanSampler, Tokens, Unigram, corpora, corrupt, pack, span_lengths, span_mask
from fmlab.data.packing import best_fit
from fmlab.data.spans import span_counts


def test_lengths_are_those_of_the_published_formula():
    assert span_lengths(512) == (568, 114)
    assert span_lengths(512, 0.5, 3) == (766, 512)  # its special case: no target longer than the input
    assert span_lengths(128) == (141, 29)
    assert span_counts(568) == (85, 28)
    with pytest.raises(ValueError, match=r"seq_len 5 is too short for a span .* legal: from 10"):
        span_lengths(5)
    assert span_lengths(10)[0] == 10
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        span_lengths(512, 1.5)
    with pytest.raises(ValueError, match="at least 1 token on average"):
        span_lengths(512, 0.15, 0.5)


def test_the_example_of_the_paper():
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"]
    mask = np.array([w in ("for", "inviting", "last") for w in words])
    inputs, target = corrupt(np.arange(10), mask, sentinels=[99, 98, 97], eos=50)
    assert inputs.tolist() == [0, 1, 99, 4, 5, 6, 7, 98, 9, 50]
    assert target.tolist() == [99, 2, 3, 98, 8, 50]
    hidden_first = np.array([True, True, False, False, True])
    inputs, target = corrupt(np.arange(5), hidden_first, [99, 98], 50)
    assert (inputs.tolist(), target.tolist()) == ([99, 2, 3, 98, 50], [99, 0, 1, 98, 4, 50])
    with pytest.raises(ValueError, match="2 spans and 1 sentinels"):
        corrupt(np.arange(5), hidden_first, [99], 50)


@pytest.mark.parametrize("anywhere", [False, True])
@pytest.mark.parametrize("length", [2, 3, 10, 20, 99, 568])
@pytest.mark.parametrize("rate", [0.15, 0.5, 0.8])
def test_every_mask_hides_the_exact_number_in_the_exact_number_of_spans(anywhere, length, rate):
    random = np.random.default_rng(0)
    hidden, spans = span_counts(length, rate)
    spans = min(spans, length - hidden + anywhere)
    for _ in range(30):
        mask = span_mask(length, random, rate, anywhere=anywhere)
        assert (len(mask), mask.sum()) == (length, hidden)
        assert (np.diff(mask.astype(int), prepend=0) == 1).sum() == spans
        if not anywhere:
            assert not mask[0]
            assert mask[-1]
    with pytest.raises(ValueError, match="at least 2 tokens"):
        span_mask(1, random)


def test_published_spans_hide_only_the_tail_of_short_rows_unless_they_may_fall_anywhere():
    """20 tokens have 3 hidden in one span, and a row that ends with a hidden span hides only the last 3."""
    random = np.random.default_rng(0)
    published = np.mean([span_mask(20, random) for _ in range(10_000)], axis=0)
    assert published.tolist() == [0.0] * 17 + [1.0] * 3
    anywhere = np.mean([span_mask(20, random, anywhere=True) for _ in range(10_000)], axis=0)
    expected = np.minimum(np.minimum(np.arange(1, 21), np.arange(20, 0, -1)), 3) / 18  # 18 places for it
    np.testing.assert_allclose(anywhere, expected, atol=0.015)


def test_all_ways_to_cut_are_equally_likely():
    random = np.random.default_rng(1)
    masks = [tuple(span_mask(6, random, rate=0.5, mean_span=1.5)) for _ in range(6000)]  # 2 x (1+2 or 2+1)
    kinds, counts = np.unique(masks, axis=0, return_counts=True)
    assert len(kinds) == 4
    assert counts.min() > 1350


def test_rows_are_full_and_hold_the_text(tmp_path):
    ids = np.tile(np.arange(100, 400), 40).astype(np.int32)
    texts = corpora.load("python-docs").documents[:40]
    tokenizer = Unigram.train(texts, 500, sentinels=30)
    sampler = SpanSampler(Tokens(ids, np.array([0, len(ids)]), 1, "x"), tokenizer, 512, 3)
    batch = sampler.batch(0)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (3, 512)
    assert batch["labels"].shape == (3, 114)
    for inputs, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert inputs[-1] == labels[-1] == tokenizer.eos
        order = [i for i in inputs if i in tokenizer.sentinels]
        assert order == [i for i in labels if i in tokenizer.sentinels] == tokenizer.sentinels[:28]
        text, spans = [], iter(labels[1:-1])
        for i in inputs[:-1]:
            if i not in tokenizer.sentinels:
                text.append(i)
                continue
            for hidden in spans:
                if hidden in tokenizer.sentinels:
                    break
                text.append(hidden)
        assert len(text) == 568
        assert set(np.diff(text)) <= {1, -299}
    *_, last = sampler.evaluation()
    assert (last["labels"] == -100).any()
    assert (last["input_ids"][last["attention_mask"] == 0] == tokenizer.pad).all()


def test_packing_keeps_documents_apart_and_wastes_little():
    random = np.random.default_rng(0)
    documents = [list(range(1, n + 1)) for n in random.integers(1, 60, 500)]
    packed = pack(documents, 128, pad=0)
    assert sorted(i for row in packed.rows for i in row) == list(range(500))
    total = sum(map(len, documents))
    assert len(packed.rows) <= -(-total // 128) + 1
    assert packed.waste == pytest.approx(1 - total / (128 * len(packed.rows)))
    assert packed.waste < 0.01
    assert packed.batch["input_ids"].shape == (len(packed.rows), 128)
    one_each = 1 - total / (128 * 500)
    assert one_each > 0.7
    ids, labels, numbers, positions = (
        packed.batch[k] for k in ("input_ids", "labels", "document_ids", "position_ids")
    )
    for r, row in enumerate(packed.rows):
        for number, index in enumerate(row):
            inside = numbers[r] == number
            assert ids[r, inside].tolist() == documents[index]
            assert labels[r, inside].tolist() == [*documents[index][1:], -100]
            assert positions[r, inside].tolist() == list(range(len(documents[index])))
    assert (labels[ids == 0] == -100).all()
    assert "500 documents" in repr(packed)


def test_packing_takes_labels_and_refuses_what_does_not_fit():
    packed = pack([[1, 2, 3], [4, 5]], 8, pad=0, labels=[[-100, 3, 9], [-100, 9]])
    assert packed.batch["labels"].tolist() == [[-100, 3, 9, -100, 9, -100, -100, -100]]
    assert torch.equal(packed.batch["document_ids"], torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]))
    assert best_fit([5, 4, 3, 2, 2], 8) == [[0, 2], [1, 3, 4]]
    for documents, labels, message in (
        ([], None, "no documents"),
        ([[1], []], None, "document 1 of 0 tokens is empty"),
        ([[1] * 9], None, "longer than seq_len 8; cut it first"),
        ([[1, 2]], [[1]], "as many labels as tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(documents, 8, 0, labels)
