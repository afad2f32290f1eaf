"""Checkers of notebook 3.4."""

import math
from collections.abc import Callable
from itertools import pairwise

from fmlab.lab.exercises import Answer, NotYet, exercise

NEAR = 1e-6


def _is(got: float, wanted: float) -> bool:
    return math.isclose(got, wanted, rel_tol=NEAR, abs_tol=1e-12)


@exercise("3.4.1", "bits per byte", returns=(int, float))
def bits_per_byte(answer: Answer) -> str:
    for losses, counts, text in (
        ([2.0, 4.0], [3, 1], "déjà vu"),
        ([3.1, 2.2, 5.0], [128, 128, 7], "x = 'naïve'  # \u4f60\u597d\n" * 20),
    ):
        nats = sum(loss * count for loss, count in zip(losses, counts, strict=True))
        size = len(text.encode())
        got = answer(list(losses), list(counts), text)
        if _is(got, nats / math.log(2) / size):
            continue
        what = f"got {got:.4f} for losses {losses} of {counts} tokens"
        if _is(got, nats / math.log(2) / len(text)):
            raise NotYet(what, "é is one character and two bytes", "len(text.encode())")
        if _is(got, nats / size):
            raise NotYet(what, "these are nats, not bits", "one bit is ln 2 nats: divide by math.log(2)")
        mean = sum(losses) / len(losses)
        if any(_is(got, mean * sum(counts) * f / size) for f in (1, 1 / math.log(2))):
            raise NotYet(
                what,
                "a short row weighs less than a long one",
                "add up loss times tokens of each row, and divide once",
            )
        if _is(got, nats / sum(counts) / math.log(2)):
            raise NotYet(what, "this is per token: divide by the bytes", "all nats / ln 2 / bytes")
        raise NotYet(
            what, "the cost of the whole text, in bits, over its bytes", "sum(loss * count) / ln 2 / bytes"
        )
    return "rows of different lengths, text beyond ASCII"


@exercise("3.4.2", "spend a budget", returns=(int, float))
def best_size(answer: Answer) -> str:
    for law, flops in (((406.4, 0.34, 410.7, 0.28), 5.76e23), ((30.0, 0.2, 900.0, 0.5), 1e15)):
        big, alpha, text, beta = law
        spent = flops / 6

        def size(
            budget: float, alpha: float = alpha, big: float = big, beta: float = beta, text: float = text
        ) -> float:
            g = (alpha * big / (beta * text)) ** (1 / (alpha + beta))
            return float(g * budget ** (beta / (alpha + beta)))

        right = size(spent)
        got = answer(*law, flops)
        if math.isclose(got, right, rel_tol=1e-3):
            continue
        what = f"got N = {got:.3g} for {flops:g} FLOPs, its loss is not the least"
        if math.isclose(got, size(flops), rel_tol=1e-3):
            raise NotYet(what, "a parameter and token cost 6 FLOPs", "N D = flops / 6")
        if math.isclose(got, spent / right, rel_tol=1e-3):
            raise NotYet(what, "these are the tokens", "N = flops / 6 / D")
        if math.isclose(got, math.sqrt(spent / 20), rel_tol=1e-3):
            raise NotYet(
                what, "20 tokens a parameter is another rule", "put D = flops / (6 N) in, and derive by N"
            )
        near = _loss(law, spent)
        raise NotYet(
            what,
            f"N = {right:.1e} would have a loss lower by {near(got) - near(right):.2g}",
            "N = (alpha A / (beta B))^(1/(alpha+beta)) (flops/6)^(beta/(alpha+beta))",
        )
    return "two laws, two budgets"


def _loss(law: tuple[float, float, float, float], spent: float) -> Callable[[float], float]:
    big, alpha, text, beta = law
    return lambda n: big / max(n, 1e-9) ** alpha + text / (spent / max(n, 1e-9)) ** beta


SENTENCE = "san francisco is near san jose and san francisco is on a bay near the bay and the sea"
TEXT = SENTENCE.split()


@exercise("3.4.3", "Kneser and Ney", returns=(int, float))
def kneser_ney(answer: Answer) -> str:
    pairs = list(pairwise(TEXT))
    kinds = set(pairs)
    for context, word, discount in (
        ("san", "francisco", 0.75),
        ("near", "francisco", 0.75),
        ("and", "bay", 0.5),
    ):
        after = [pair for pair in pairs if pair[0] == context]
        kept = max(after.count((context, word)) - discount, 0) / len(after)
        freed = discount * len(set(after)) / len(after)
        right = kept + freed * sum(b == word for _, b in kinds) / len(kinds)
        got = answer(list(TEXT), context, word, discount)
        if _is(got, right):
            continue
        what = f"got {got:.4f} for {word!r} after {context!r}"
        if _is(got, kept + freed * TEXT.count(word) / len(TEXT)) or _is(
            got, kept + freed * TEXT[1:].count(word) / (len(TEXT) - 1)
        ):
            raise NotYet(
                what,
                "that shares out by how often a word occurs",
                "count the different words before it, over the different bigrams",
            )
        if _is(got, kept):
            raise NotYet(what, "what was taken away is given to no one", "add freed x share")
        if _is(got, kept + discount * sum(b == word for _, b in kinds) / len(kinds)):
            raise NotYet(
                what,
                "the discount is taken from each different word after the context",
                "freed = discount x different words after it / all words after it",
            )
        if _is(got, after.count((context, word)) / len(after) + freed * right):
            raise NotYet(what, "nothing was discounted", "max(count - discount, 0)")
        raise NotYet(what, "compute the three parts apart: kept, freed, share", "kept + freed x share")
    return "seen and unseen pairs"
