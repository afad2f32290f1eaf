"""The scaling law, its points, and the n-gram model beside which they are set."""

import math
from collections import Counter

import numpy as np
import pytest

from fmlab.data import Corpus, load
from fmlab.train import KneserNey, ScalingLaw, bootstrap, fit_law, interval, scaling_sweep
from fmlab.train.ngram import FALLBACK, _discounts

CHINCHILLA = ScalingLaw(floor=1.69, A=406.4, alpha=0.34, B=410.7, beta=0.28)
SIZES = np.tile([1e8, 4e8, 1e9, 3e9, 1e10, 7e10], 4)
TEXTS = np.repeat([5e9, 2e10, 1e11, 1e12], 6)
RUNS = (SIZES.tolist(), TEXTS.tolist())


def test_a_law_is_found_again_from_its_own_losses() -> None:
    found = fit_law(*RUNS, CHINCHILLA.loss(SIZES, TEXTS).tolist())
    assert found.floor == pytest.approx(1.69, rel=1e-3)
    assert (found.alpha, found.beta) == pytest.approx((0.34, 0.28), rel=2e-3)
    assert found.loss(70e9, 1.4e12) == pytest.approx(1.9366, abs=2e-3)  # what appendix D.3's constants give


def test_one_run_that_went_astray_does_not_bend_the_law() -> None:
    losses = CHINCHILLA.loss(SIZES, TEXTS)
    losses[7] *= 1.5
    assert fit_law(*RUNS, losses.tolist()).loss(70e9, 1.4e12) == pytest.approx(1.9366, abs=0.01)


def test_drawing_runs_again_gives_intervals_that_hold_the_truth() -> None:
    noise = np.exp(np.random.default_rng(0).normal(0, 0.003, len(SIZES)))
    laws = bootstrap(*RUNS, (CHINCHILLA.loss(SIZES, TEXTS) * noise).tolist(), resamples=20)
    low, high = interval(laws, lambda law: law.alpha)
    assert low < 0.34 < high < 0.38
    low, high = interval(laws, lambda law: law.loss(70e9, 1.4e12), share=0.95)
    assert 1.92 < low < 1.9366 < high < 1.95


def test_the_best_split_is_a_minimum() -> None:
    n, d = CHINCHILLA.best_split(5.76e23)
    assert 6 * n * d == pytest.approx(5.76e23)
    assert all(CHINCHILLA.loss(n * f, d / f) > CHINCHILLA.loss(n, d) for f in (0.9, 1.1))


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        (([1e6] * 5, [1e6] * 5, [3.0] * 5), "6 or more"),
        (([1e6] * 8, [1e6, 2e6, 3e6, 4e6] * 2, [3.0] * 8), "3 different sizes"),
        (([1e6, 2e6, 3e6] * 3, [1e6, 2e6, 3e6] * 3, [3.0] * 8 + [math.nan]), "above 0 and finite"),
        (([1e6] * 8, [1e6] * 8, [3.0] * 7), "one of each"),
    ],
)
def test_what_no_law_can_be_fitted_to_is_refused(runs: tuple[list[float], ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit_law(*runs)


def test_committed_points_are_those_of_the_planned_sweep() -> None:
    points = scaling_sweep.measured()
    assert [(p.size, p.tokens, p.seed) for p in points] == list(scaling_sweep.planned())
    for point in points:
        model = scaling_sweep.SIZES[point.size].build()
        assert model.num_parameters(embeddings=False, positions=False) == point.parameters
        assert len(point.by_position) == scaling_sweep.LENGTH
        assert np.mean(point.by_position) == pytest.approx(point.loss, abs=0.02)
    assert len({str(point.made_on) for point in points}) == 1
    with pytest.raises(ValueError, match="legal: 16x2"):
        scaling_sweep.run_point("17x2", 1024)


def test_joined_corpora() -> None:
    both = load("python-docs+python-source")
    assert both.documents == load("python-docs").documents + load("python-source").documents
    with pytest.raises(ValueError, match="names a text twice"):
        load("python-docs+python-docs")
    with pytest.raises(ValueError, match="unknown corpus"):
        load("python-docs+nothing")


def _by_hand(text: list[int], order: int, vocab_size: int):  # type: ignore[no-untyped-def]
    """p(word, context), from dictionaries and the formula as it is printed."""
    counts = {order: Counter(tuple(text[i : i + order]) for i in range(len(text) - order + 1))}
    for n in range(order - 1, 0, -1):
        counts[n] = Counter(gram[1:] for gram in counts[n + 1])

    def probability(word: int, context: tuple[int, ...]) -> float:
        n = len(context) + 1
        shorter = 1 / vocab_size if n == 1 else probability(word, context[1:])
        after = {gram[-1]: count for gram, count in counts[n].items() if gram[:-1] == context}
        if not after:
            return shorter
        d = _discounts(np.array(list(counts[n].values())))
        off = {w: d[min(c, 3) - 1] for w, c in after.items()}
        kept = max(after.get(word, 0) - off.get(word, 0.0), 0.0)
        return (kept + sum(off.values()) * shorter) / sum(after.values())

    return probability


def test_kneser_ney_is_the_printed_formula_and_adds_up_to_one() -> None:
    draw = np.random.default_rng(0)
    text = draw.zipf(1.6, 400).clip(max=7) - 1  # 7 kinds of token
    model, by_hand = KneserNey.fit(text, order=3, vocab_size=8), _by_hand(text.tolist(), 3, 8)
    new = [0, 3, 7, 1, 1, 6, 2]  # 7 was never seen
    expected = [-math.log(by_hand(new[i], tuple(new[max(0, i - 2) : i]))) for i in range(1, len(new))]
    assert model.nats(new) == pytest.approx(expected, rel=1e-12)
    for context in ((0, 1), (7, 0), (6, 6)):
        assert sum(math.exp(-model.nats([*context, word])[-1]) for word in range(8)) == pytest.approx(1)


def test_a_shorter_gram_counts_the_tokens_before_it() -> None:
    # 5 follows only 4, often; 6 follows 1, 2 and 3, once each. After a context never seen, 6 is likelier.
    text = [4, 5, 0] * 20 + [1, 6, 0, 2, 6, 0, 3, 6, 0]
    model = KneserNey.fit(text, order=2, vocab_size=8)
    five, six = (model.nats([7, word])[-1] for word in (5, 6))
    assert six < five
    assert model.levels[0].discounts == FALLBACK


def test_pieces_are_counted_each_for_itself() -> None:
    pieces = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
    model = KneserNey.fit(pieces, 2, 8)
    assert 3 * 8 + 4 not in model.levels[1].grams
    assert len(model.levels[1].grams) == 6


@pytest.mark.parametrize(
    ("ids", "order", "says"),
    [
        ([0, 1], 3, "too few"),
        ([0, 9], 2, "legal are 0 to 7"),
        ([0, 1], 22, "1 to 21"),
        ([0.5, 1], 1, "whole"),
    ],
)
def test_what_no_grams_can_be_counted_in_is_refused(ids: list[float], order: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        KneserNey.fit(ids, order, 8)


def test_bytes_are_counted_with_the_end_of_each_document() -> None:
    assert scaling_sweep.num_bytes(Corpus("mine", ["abc", "é"], "")) == 3 + 1 + 2 + 1
