"""Fine-tuning examples: padding, labels of the response only, each example once on any number of ranks."""

import pytest
import torch

from fmlab.data import (
    ByteBPE,
    ExampleSampler,
    LabelledTexts,
    TextPairs,
    Unigram,
    WordPiece,
    class_examples,
    response_examples,
    seq2seq_examples,
)

PAIRS = TextPairs("x", ["say one", "say two now"], ["one", "two two"], "")
TEXTS = PAIRS.documents * 20


def test_examples_are_padded_to_one_shape_and_counted_once():
    examples = [
        {"input_ids": list(range(1, n + 2)), "labels": [n] * n, "class_labels": n} for n in range(1, 8)
    ]
    sampler = ExampleSampler(examples, pad=99, batch_size=4, seed=2)
    epoch = torch.cat([sampler.batch(step)["class_labels"] for step in range(2)])[:7]
    assert sorted(epoch.tolist()) == list(range(1, 8))
    batch = sampler.batch(0)
    assert batch["input_ids"].shape == (4, 8)
    for i, n in enumerate(batch["class_labels"].tolist()):
        assert batch["input_ids"][i].tolist() == [*range(1, n + 2), *[99] * (7 - n)]
        assert batch["attention_mask"][i].tolist() == [1] * (n + 1) + [0] * (7 - n)
        assert batch["labels"][i].tolist() == [n] * n + [-100] * (7 - n)
    seen = []
    for rank in range(2):
        mine = ExampleSampler(examples, 99, 4, 2, rank, 2)
        assert torch.equal(mine.batch(1)["input_ids"], sampler.batch(1)["input_ids"][2 * rank : 2 * rank + 2])
        seen += [c for b in mine.evaluation() for c in b["class_labels"].tolist() if c != -100]
    assert sorted(seen) == list(range(1, 8))
    *_, last = sampler.evaluation()
    assert (last["labels"][3] == -100).all()
    assert last["attention_mask"][3].tolist() == [1] + [0] * 7
    other = ExampleSampler(examples[::-1], 99, 4, 2)
    with pytest.raises(ValueError, match="cannot resume with other data; examples"):
        other.load_state_dict(sampler.state_dict())
    assert "attention_mask" not in ExampleSampler([{"input_ids": [1, 2]}] * 3, 0, 2).batch(0)
    with pytest.raises(ValueError, match="no examples"):
        ExampleSampler([], 0, 2)
    with pytest.raises(ValueError, match="example 1 has"):
        ExampleSampler([{"input_ids": [1]}, {"input_ids": []}], 0, 2)


def test_class_and_translation_examples_are_framed():
    wordpiece, unigram = WordPiece.train(TEXTS, 60), Unigram.train(TEXTS, 60, sentinels=5)
    corpus = LabelledTexts("x", PAIRS.firsts, "", [1, 0], ["a", "b"])
    examples = class_examples(corpus, wordpiece, max_length=4)
    assert [e["class_labels"] for e in examples] == [1, 0]
    assert all(e["input_ids"][0] == wordpiece.cls and e["input_ids"][-1] == wordpiece.sep for e in examples)
    assert max(len(e["input_ids"]) for e in examples) == 4
    example = seq2seq_examples(PAIRS, unigram)[1]
    assert unigram.decode(example["input_ids"]) == "say two now</s>"
    assert unigram.decode(example["labels"]) == "two two</s>"


def test_only_the_response_and_the_end_are_asked_for():
    bpe = ByteBPE.train(TEXTS, 270)
    example = response_examples(PAIRS, bpe, template="Q: {}\nA:")[1]
    prompt = bpe.encode("Q: say two now\nA:")
    ids, labels = example["input_ids"], example["labels"]
    assert len(ids) == len(labels)
    assert bpe.decode(ids) == "Q: say two now\nA:two two"
    assert labels[: len(prompt) - 1] == [-100] * (len(prompt) - 1)
    assert bpe.decode(labels[len(prompt) - 1 :]) == "two two<|endoftext|>"
    assert labels[len(prompt) - 1] == ids[len(prompt)]
    kept = response_examples(PAIRS, bpe, max_length=len(bpe.encode("say one\none")))
    assert len(kept) == 1
    with pytest.raises(ValueError, match="no pair of 2 fits into max_length 3"):
        response_examples(PAIRS, bpe, max_length=3)


def test_a_response_to_nothing_is_predicted_from_its_own_beginning():
    # The labels were the inputs themselves: a loss of zero for copying.
    texts = ["fox jumps over the lazy dog " * 20]
    tokenizer = Unigram.train(texts, 100, sentinels=5)  # white space alone is no token to it
    pairs = TextPairs("none asked", ["", "fox"], ["the lazy dog", "jumps over"], "")
    for example in response_examples(pairs, tokenizer):
        ids, labels = example["input_ids"], example["labels"]
        assert len(ids) == len(labels)
        assert labels[-1] == tokenizer.eos
        assert all(label in (-100, following) for label, following in zip(labels, ids[1:], strict=False))
