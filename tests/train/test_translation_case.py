"""The baselines of translation by hand, and the committed result of the T5 case."""

import pytest

from fmlab.data import TextPairs
from fmlab.train import translation_case as case

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
    training, french, chinese, sums = case.kept()
    assert training["command"].startswith("python -m fmlab.train.translation_case")
    assert len(training["weights"]) == 12
    assert training["curve"][-1] < training["curve"][0]
    for task in (french, chinese):
        assert {"copy", "dictionary", "nearest", "T5", "T5, 4 beams"} <= set(task)
        assert all(0 <= task[way] <= 100 for way in ("copy", "dictionary", "nearest", "T5"))
    assert sums["tested on"] > 50
    assert 0 <= sums["right"] <= 1


def test_bleu_of_the_wanted_texts_is_100() -> None:
    assert case.bleu(["une petite maison bleue"], ["une petite maison bleue"], "13a") == pytest.approx(100)
