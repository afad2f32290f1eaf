"""The baselines of translation by hand, and the committed result of the T5 case."""

import pytest
import torch

from fmlab.data import ExampleSampler, TextPairs, Unigram, seq2seq_examples
from fmlab.models import T5, T5Config
from fmlab.objectives import Seq2SeqLM
from fmlab.train import translation_case as case
from fmlab.train.adapt import fine_tune

FRENCH = TextPairs(
    "t",
    ["open file", "close file", "open window", "save all"],
    ["ouvrir fichier", "fermer fichier", "ouvrir fenêtre", "tout enregistrer"],
    "",
)


def test_a_dictionary_pairs_words_that_occur_together() -> None:
    known = case.dictionary(FRENCH, str.split)
    assert known["open"] == "ouvrir"
    assert known["file"] == "fichier"
    assert known["close"] == "fermer"
    assert case.by_words(known, "Open file now") == "ouvrir fichier now"


def test_the_nearest_known_text() -> None:
    assert case.nearest(FRENCH, "close the file") == "fermer fichier"


def test_what_is_kept_says_where_it_comes_from_and_reports_every_baseline() -> None:
    training, french, chinese, sums, earlier = case.kept()
    for phase in training["phases"]:
        assert phase["command"].startswith("fmlab train t5-mini --corpus text-to-text")
        assert phase["held out"][-1][1] < phase["held out"][0][1]
    assert len(training["weights"]) == 12
    for task in (french, chinese):
        assert {"copy", "nearest", "T5, 4 beams"} <= set(task)
        assert 100 > task["T5"] > task["dictionary"] > 0
        assert task["another question"] - task["own question"] > 3, "it reads what it is asked"
    assert sums["tested on"] > 50
    assert 0.2 < sums["right"] <= 1
    for run in earlier["runs"]:
        assert set(run["scores"]) == set(case.LANGUAGES)
        assert max(run["scores"].values()) < french["T5"]


def test_bleu_of_the_wanted_texts_is_100() -> None:
    assert case.bleu(["une petite maison bleue"], ["une petite maison bleue"], "13a") == pytest.approx(100)


def test_a_question_is_worth_something_to_a_model_that_reads_it() -> None:
    """After learning to answer by the question alone, the loss behind others' questions is far higher."""
    words = ["ant", "bee", "cow", "dog", "elk", "fox"]
    pairs = TextPairs("t", words * 4, [word[::-1] for word in words] * 4, "")
    tokenizer = Unigram.train(pairs.documents, vocab_size=140)
    torch.manual_seed(0)
    model = T5(T5Config(140, 1, 32, 2, 16, 64))
    own, other = case.worth(model, tokenizer, pairs.take(range(6)))
    assert abs(own - other) < 0.3  # it has read nothing yet
    sampler = ExampleSampler(seq2seq_examples(pairs, tokenizer), tokenizer.pad, 12)
    fine_tune(model, sampler, Seq2SeqLM(), 60, lr=1e-2)
    own, other = case.worth(model, tokenizer, pairs.take(range(6)))
    assert other > own + 1
