"""Batch makers for masked, pair, span and prefix objectives: what they share, whatever the family."""

import numpy as np
import pytest
import torch

from fmlab.data import (
    Corpus,
    MaskedSampler,
    PrefixSampler,
    SentencePairSampler,
    SpanSampler,
    Tokens,
    Unigram,
    WordPiece,
    check_batch,
    corpora,
    encode,
    encode_sentences,
)

DOCS = corpora.load("python-docs").documents[:30]
CORPUS = Corpus("docs", DOCS, "")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer of each kind, and the corpus encoded with it."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache")
    patch.setattr("fmlab.data.cache.cache_directory", lambda: folder)
    wordpiece, unigram = WordPiece.train(DOCS, 500), Unigram.train(DOCS, 500, sentinels=30)
    yield {
        "wordpiece": wordpiece,
        "unigram": unigram,
        "masked": (MaskedSampler, encode(CORPUS, wordpiece), wordpiece),
        "pairs": (SentencePairSampler, encode_sentences(CORPUS, wordpiece), wordpiece),
        "spans": (SpanSampler, encode(CORPUS, unigram), unigram),
        "prefix": (PrefixSampler, encode(CORPUS, unigram)),
    }
    patch.undo()


KINDS = ["masked", "pairs", "spans", "prefix"]


def build(made, kind, **options):
    maker, *parts = made[kind]
    return maker(*parts, **{"seq_len": 32, "batch_size": 6, "seed": 3} | options)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_one_global_batch_and_resuming_is_exact(made, kind):
    whole = build(made, kind)
    last = whole.windows_per_epoch // 6 + 1  # a step on the border of two epochs, too
    for step in (0, 5, last):
        for world in (2, 3):
            parts = [build(made, kind, rank=r, world_size=world).batch(step) for r in range(world)]
            together = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            assert equal(together, whole.batch(step))
    stream = iter(whole)
    batches = [next(stream) for _ in range(4)]
    resumed = build(made, kind)
    resumed.load_state_dict(whole.state_dict())
    assert equal(next(iter(resumed)), build(made, kind).batch(4))
    assert equal(batches[2], whole.batch(2))
    assert not equal(build(made, kind, seed=4).batch(2), batches[2])
    with pytest.raises(ValueError, match="seed: 3 in the checkpoint, 4 now"):
        build(made, kind, seed=4).load_state_dict(whole.state_dict())
    assert "windows an epoch" in repr(whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_sees_each_window_once_on_any_number_of_ranks(made, kind, world):
    targets, shapes = [], []
    for rank in range(world):
        batches = list(build(made, kind, rank=rank, world_size=world, batch_size=4).evaluation())
        shapes.append([tuple(batch["input_ids"].shape) for batch in batches])
        rows = [row[row != -100].tolist() for batch in batches for row in batch["labels"]]
        targets += [row for row in rows if row]
    assert all(shape == shapes[0] for shape in shapes), "ranks with other shapes would hang"
    single = build(made, kind, batch_size=1)
    expected = [b["labels"][b["labels"] != -100].tolist() for b in single.evaluation()]
    assert len(expected) == single.evaluation_windows
    assert sorted(targets) == sorted(row for row in expected if row)
    assert equal(next(single.evaluation()), next(build(made, kind, batch_size=1).evaluation()))
    assert len(list(single.evaluation(max_batches=3))) == 3


def windows_seen(sampler, epochs=2):
    """The labels of each window in each epoch: {window: [labels, ...]}."""
    seen = {}
    for index in range(epochs * sampler.windows_per_epoch):
        number = sampler._window(index).number
        seen.setdefault(number, []).append(sampler.batch(index)["labels"])
    return list(seen.values())


@pytest.mark.parametrize("kind", ["masked", "pairs", "spans"])
def test_dynamic_choices_change_every_epoch_and_static_ones_never(made, kind):
    static = windows_seen(build(made, kind, batch_size=1, versions=1))
    assert all(torch.equal(first, second) for first, second in static)
    dynamic = windows_seen(build(made, kind, batch_size=1))
    assert sum(torch.equal(first, second) for first, second in dynamic) <= 0.05 * len(dynamic)
    two = windows_seen(build(made, kind, batch_size=1, versions=2), epochs=3)
    assert all(torch.equal(first, third) for first, _, third in two)
    assert not all(torch.equal(first, second) for first, second, _ in two)


def test_prefix_rows_predict_only_what_follows_the_prefix(made):
    sampler = build(made, "prefix", batch_size=64)
    batch, plain = sampler.batch(0), super(PrefixSampler, sampler)
    lengths = batch["prefix_lengths"]
    assert lengths.min() >= 1
    assert lengths.max() <= 31
    assert lengths.unique().numel() > 20
    expected = plain._rows([sampler._window(i) for i in range(64)])["labels"]
    for row, labels, length in zip(expected, batch["labels"], lengths.tolist(), strict=True):
        assert (labels[: length - 1] == -100).all()
        assert torch.equal(labels[length - 1 :], row[length - 1 :])
    with pytest.raises(ValueError, match="seq_len of at least 2"):
        build(made, "prefix", seq_len=1)


def test_what_does_not_go_together_is_refused(made):
    _, tokens, unigram = made["spans"]
    with pytest.raises(ValueError, match=r"Unigram has no mask token; .* take WordPiece or RoBERTaBPE"):
        MaskedSampler(tokens, unigram, 32, 4)
    other = WordPiece.train(DOCS[:5], 300)
    with pytest.raises(ValueError, match=r"encoded by another tokenizer .* encode it again"):
        MaskedSampler(made["masked"][1], other, 32, 4)
    with pytest.raises(ValueError, match="ids up to 499"):
        MaskedSampler(Tokens(np.arange(500, dtype=np.int32), np.array([0, 500]), 1, "x"), other, 32, 4)
    with pytest.raises(ValueError, match="sentences were encoded by another"):
        SentencePairSampler(made["pairs"][1], other, 32, 4)
    for rate in (0, 1, -0.1):
        with pytest.raises(ValueError, match="mask rate must be between 0 and 1"):
            build(made, "masked", rate=rate)
    with pytest.raises(ValueError, match="no room for text"):
        build(made, "masked", seq_len=2)
    with pytest.raises(ValueError, match="no room for two texts"):
        build(made, "pairs", seq_len=4)
    with pytest.raises(ValueError, match="legal: 'next', 'order'"):
        build(made, "pairs", task="nsp")
    with pytest.raises(ValueError, match="too few for sequences"):
        build(made, "masked", seq_len=10**6)
    with pytest.raises(ValueError, match="versions must be at least 1"):
        build(made, "spans", versions=0)
    with pytest.raises(ValueError, match=r"77 hidden spans .* only 30 sentinels; .* sentinels=77"):
        build(made, "spans", seq_len=512, mean_span=1)
    lonely = encode_sentences(Corpus("x", ["One.", "Two."], ""), other)
    with pytest.raises(ValueError, match="two sentences"):
        SentencePairSampler(lonely, other, 32, 4)


def test_a_batch_for_another_model_is_refused(made):
    batch = build(made, "pairs").batch(0)
    check_batch(batch, vocab_size=500, max_positions=32)
    with pytest.raises(ValueError, match=r"input_ids .* to \d+; legal: 0 to 99; .*same vocabulary"):
        check_batch(batch, vocab_size=100)
    with pytest.raises(ValueError, match=r"rows of 32 tokens .* at most 16"):
        check_batch(batch, 500, max_positions=16)
    with pytest.raises(ValueError, match=r"labels has values from -7 .*-100 for no target"):
        check_batch(batch | {"labels": torch.full((6, 32), -7)}, 500)
    with pytest.raises(ValueError, match="sentence_labels has values from 2 to 2; legal: 0 to 1"):
        check_batch(batch | {"sentence_labels": torch.full((6,), 2)}, 500)
