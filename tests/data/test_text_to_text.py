"""Pairs of several tasks in one corpus: nothing leaks from the test, and cut texts teach nothing."""

import pytest

from fmlab.data import Corpus, TextPairs, TextToText, Unigram, load, short_pairs, text_to_text_examples
from fmlab.data.holding_out import words_only
from fmlab.data.text_to_text import PREFIXES, text_to_text_tasks


@pytest.fixture(scope="module")
def tasks():
    pytest.importorskip("jupyterlab_language_pack_fr_FR", reason="needs: pip install '.[data]'")
    return text_to_text_tasks()


def english(pairs, task):
    return {words_only(text.removeprefix(PREFIXES[task])) for text in pairs.firsts}


def test_no_text_is_learnt_from_and_tested_on(tasks):
    for task, (learn, test) in tasks.items():
        assert all(text.startswith(PREFIXES[task]) for text in learn.firsts + test.firsts)
        assert not english(learn, task) & english(test, task)
    corpus = load("text-to-text")
    assert len(corpus.pairs) == sum(len(learn) for learn, _ in tasks.values())


def test_the_same_english_is_on_the_same_side_for_both_languages():
    pairs = TextPairs(
        "t",
        [f"{p}text {n}" for n in range(40) for p in ("French: ", "Chinese: ")],
        [f"{n}" for n in range(80)],
        "",
    )
    learn, held = TextToText("t", pairs.documents, "", pairs).split(0.2)
    assert len(held.pairs) >= 16
    sides = [{text.partition(": ")[2] for text in part.pairs.firsts} for part in (learn, held)]
    assert not sides[0] & sides[1]
    assert set(held.documents) == set(held.pairs.documents)


def test_long_pairs_are_left_out_whole_and_a_corpus_without_pairs_is_refused():
    pairs = TextPairs("t", ["a b", "a b c d e f g h"], ["c", "d"], "")
    tokenizer = Unigram.train(pairs.documents * 9, vocab_size=160)
    longest = len(tokenizer.encode("a b")) + 1
    assert short_pairs(pairs, tokenizer, longest).firsts == ["a b"]
    with pytest.raises(ValueError, match="no pair of 2 in t is as short as 1 tokens"):
        short_pairs(pairs, tokenizer, 1)
    with pytest.raises(ValueError, match="legal: corpus text-to-text"):
        text_to_text_examples(Corpus("mine", ["a"], ""), tokenizer, 8)
