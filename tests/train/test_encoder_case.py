"""The baselines by hand, the committed results of the BERT case, and the statistics that compare its runs."""

import math

import pytest
import torch

from fmlab.data import LabelledTexts
from fmlab.train import encoder_case, roberta_ablations
from fmlab.train.baselines import bm25_scores, retrieval_of, tfidf_accuracy
from fmlab.train.roberta_ablations import Ablation, compared, run_arm


def test_bm25_is_its_formula() -> None:
    documents = ["the cat sat", "the dog and the cat", "a fish"]
    found = bm25_scores(["cat fish"], documents)[0]
    mean = (3 + 5 + 2) / 3
    cat, fish = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    part = lambda idf, length: idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 * length / mean))  # noqa: E731
    expected = torch.tensor([part(cat, 3), part(cat, 5), part(fish, 2)], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert bm25_scores(["THE the"], documents)[0, 1] > bm25_scores(["the"], documents)[0, 1]
    with pytest.raises(ValueError, match="no documents"):
        bm25_scores(["cat"], [])
    ranks = retrieval_of(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), [0, 1])
    assert ranks.mrr == pytest.approx((1 / 2 + 1) / 2), "a tie is no success"


def test_tfidf_finds_classes_that_words_tell_apart() -> None:
    texts = [f"red apple {i}" for i in range(9)] + [f"blue sea {i}" for i in range(9)]
    corpus = LabelledTexts("t", texts, "", [0] * 9 + [1] * 9, ["fruit", "water"])
    assert tfidf_accuracy(corpus, corpus) == 1
    with pytest.raises(ValueError, match="the classes differ"):
        tfidf_accuracy(corpus, LabelledTexts("u", texts, "", corpus.labels, ["a", "b"]))


def runs(differences: list[float]) -> list[Ablation]:
    base = [Ablation("the recipe", seed, 3.0 + seed, 1.0, 1, 1, 1.0) for seed in range(len(differences))]
    other = [Ablation("byte BPE", s, 3.0 + s - d, 1.0, 1, 1, 1.0) for s, d in enumerate(differences)]
    return base + other


def test_an_arm_is_compared_seed_by_seed_with_students_t() -> None:
    found = compared(runs([0.1, 0.3]), "byte BPE")
    assert found.gain == pytest.approx(0.2)
    assert found.noise == pytest.approx(12.71 * math.sqrt(0.02) / math.sqrt(2))
    assert found.verdict == "within noise"
    assert compared(runs([0.1, 0.11, 0.1, 0.11]), "byte BPE").verdict == "better"
    assert compared(runs([-0.1, -0.11, -0.1, -0.11]), "byte BPE").verdict == "worse"
    with pytest.raises(ValueError, match="1 seeds in common"):
        compared(runs([0.1]), "byte BPE")
    with pytest.raises(ValueError, match="there is no arm 'dynamic'; legal are the recipe, static masks"):
        run_arm("dynamic")


def test_the_committed_results_are_whole() -> None:
    committed = roberta_ablations.measured()
    arms = {run.arm for run in committed}
    assert arms == set(roberta_ablations.ARMS)
    for arm in arms - {roberta_ablations.RECIPE}:
        assert math.isfinite(compared(committed, arm).gain)
    assert len({run.tokens for run in committed}) == 1, "all arms read as much"
    assert roberta_ablations.provenance()["command"].startswith("python -m fmlab.train.roberta_ablations")
    kept = {row["model"]: row for row in encoder_case.kept()}
    assert kept["counted words"]["accuracy"] == pytest.approx(
        encoder_case.counted_words()["accuracy"], abs=0.03
    )
    assert kept["distilbert"]["parameters"] < kept["bert-256"]["parameters"]
