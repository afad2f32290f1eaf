"""What is hidden from a masked language model: the shares, never a special token, whole words."""

import numpy as np
import pytest

from fmlab.data import (
    Corpus,
    MaskedSampler,
    Masking,
    RoBERTaBPE,
    SentencePairSampler,
    WordPiece,
    corpora,
    encode,
    encode_sentences,
    split_sentences,
)

DOCS = corpora.load("python-docs").documents[:30]


@pytest.fixture(scope="module")
def tokenizer():
    return WordPiece.train(DOCS, 400)


@pytest.mark.parametrize("whole_words", [False, True])
def test_fifteen_percent_in_shares_of_80_10_10_and_never_a_special_token(tokenizer, whole_words):
    masking = Masking(tokenizer, whole_words=whole_words)
    random = np.random.default_rng(0)
    special = np.array(sorted(tokenizer.special_ids))
    ordinary = np.array([i for i in range(400) if i not in tokenizer.special_ids])
    totals = np.zeros(4)
    for _ in range(400):
        ids = np.array(
            [tokenizer.cls, *random.choice(ordinary, 90), tokenizer.sep, *[tokenizer.pad] * 8], dtype=np.int64
        )
        inputs, labels = masking(ids, random)
        target = labels != -100
        assert (labels[target] == ids[target]).all()
        assert (inputs[~target] == ids[~target]).all()
        assert not np.isin(ids[target], special).any()
        assert not np.isin(inputs[target & (inputs != tokenizer.mask)], special).any()
        shown = inputs[target]
        totals += [target.sum(), (shown == tokenizer.mask).sum(), (shown == ids[target]).sum(), 90]
    targets, masked, kept, eligible = totals
    assert targets / eligible == pytest.approx(0.15, abs=0.02 if whole_words else 0.003)
    assert masked / targets == pytest.approx(0.8, abs=0.02)
    assert kept / targets == pytest.approx(0.1, abs=0.02)


def test_whole_words_are_hidden_with_all_their_pieces(tokenizer):
    ids = np.array(tokenizer.frame(tokenizer.encode(DOCS[3]))[0])
    masking, starts = Masking(tokenizer, whole_words=True), tokenizer.starts_word()
    words = np.cumsum(starts[ids])
    pieces = np.bincount(words)
    assert (pieces > 1).any()
    for seed in range(20):
        target = masking(ids, np.random.default_rng(seed))[1] != -100
        hidden = np.bincount(words, weights=target)
        assert set(hidden[hidden > 0] - pieces[hidden > 0]) == {0}
    split = [Masking(tokenizer)(ids, np.random.default_rng(s))[1] != -100 for s in range(20)]
    assert any(
        (h > 0).any() and ((h > 0) & (h < pieces)).any() for h in (np.bincount(words, t) for t in split)
    )


def test_a_short_row_has_a_target_and_an_empty_one_none(tokenizer):
    word = tokenizer.encode("the")
    _, labels = Masking(tokenizer)(np.array(tokenizer.frame(word)[0]), np.random.default_rng(0))
    assert labels.tolist() == [-100, *word, -100]
    inputs, labels = Masking(tokenizer)(np.array(tokenizer.frame([])[0]), np.random.default_rng(0))
    assert inputs.tolist() == [tokenizer.cls, tokenizer.sep]
    assert (labels == -100).all()


def test_rows_are_the_text_in_its_frame_and_an_epoch_covers_it(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("fmlab.data.cache.cache_directory", lambda: tmp_path)
    for kind in (tokenizer, RoBERTaBPE.train(DOCS, 400)):
        tokens = encode(Corpus("x", DOCS, ""), kind)
        sampler = MaskedSampler(tokens, kind, 32, 1, versions=1)
        text = []
        for batch in sampler.evaluation():
            ids, labels = batch["input_ids"][0], batch["labels"][0]
            ids = ids.where(labels == -100, labels)
            ids = ids[batch["attention_mask"][0].bool()] if "attention_mask" in batch else ids
            assert (ids[0], ids[-1]) == (kind.cls, kind.sep)
            text += ids[1:-1].tolist()
        assert text == tokens.ids.tolist()
        assert "attention_mask" not in sampler.batch(0)


@pytest.mark.parametrize("task", ["next", "order"])
def test_pairs_are_framed_and_half_of_them_do_not_follow(tokenizer, task):
    documents = [
        " ".join(f"{letter}{word}." for word in ("a", "b", "c", "d") for _ in range(3)).replace(". ", ".\n\n")
        for letter in "pqrst"
    ]
    corpus = Corpus("x", documents, "")
    pieces = WordPiece.train(documents, 60)
    sampler = SentencePairSampler(encode_sentences(corpus, pieces), pieces, 24, 500, task=task, rate=0)
    batch = sampler.batch(0)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "sentence_labels"}
    assert batch["sentence_labels"].float().mean() == pytest.approx(0.5, abs=0.1)
    flat = {letter: "".join(documents["pqrst".index(letter)].split()) for letter in "pqrst"}
    for ids, types, mask, label in zip(
        batch["input_ids"].tolist(),
        batch["token_type_ids"].tolist(),
        batch["attention_mask"].tolist(),
        batch["sentence_labels"].tolist(),
        strict=True,
    ):
        length = sum(mask)
        ids = ids[:length]
        assert ids[0] == pieces.cls
        assert ids[-1] == pieces.sep
        border = ids.index(pieces.sep)
        assert types == [0] * (border + 1) + [1] * (length - border - 1) + [0] * (24 - length)
        first = "".join(pieces.decode(ids[1:border]).split())
        second = "".join(pieces.decode(ids[border + 1 : -1]).split())
        assert first
        assert second
        follows = any(first + second in text for text in flat.values())
        if task == "next":
            assert label == int(first.replace(".", "")[0] != second.replace(".", "")[0])
        if not label:
            assert follows or length == 24  # a truncated pair may have lost its middle
        elif task == "order" and length < 24:
            assert any(second + first in text for text in flat.values())


def test_pairs_carry_masks_too(tokenizer):
    sampler = SentencePairSampler(encode_sentences(Corpus("x", DOCS, ""), tokenizer), tokenizer, 48, 50)
    batch = sampler.batch(1)
    real = batch["attention_mask"].bool()
    assert 0.1 < (batch["labels"] != -100).sum() / real.sum() < 0.16
    assert (batch["labels"][~real] == -100).all()
    assert (batch["input_ids"][~real] == tokenizer.pad).all()


def test_sentences():
    assert split_sentences('One. Two? "Three!" Four e.g. this.\n\nfive\n\n') == [
        "One.",
        "Two?",
        '"Three!" Four e.g. this.',
        "five",
    ]
