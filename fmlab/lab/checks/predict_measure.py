"""Checkers of notebook 0.2."""

import math

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("0.2.1", "how many bytes?", returns=(int, float))
def ring_all_reduce_bytes(answer: Answer) -> str:
    for numbers, bytes_each, ranks in ((1000, 4, 4), (30_000, 2, 8), (77, 4, 3), (500, 8, 1)):
        right = 2 * (ranks - 1) / ranks * numbers * bytes_each
        got = answer(numbers, bytes_each, ranks)
        if math.isclose(got, right, abs_tol=1e-6):
            continue
        what = f"got {got:,.0f} B for {numbers:,} numbers of {bytes_each} bytes on {ranks} ranks"
        if ranks == 1 or math.isclose(got, 2 * numbers * bytes_each):
            raise NotYet(
                what,
                "no rank sends all parts in a round; one rank has nobody to talk to: it sends nothing",
                "the factor is (ranks - 1) / ranks",
            )
        if math.isclose(got, right / 2):
            raise NotYet(
                what, "the parts go twice around the ring: to add up, and to spread", "a factor 2 is missing"
            )
        if math.isclose(got, right * ranks):
            raise NotYet(
                what,
                "each message is one part of the tensor, not all of it",
                "a part is 1/ranks of the bytes",
            )
        if math.isclose(got, right / bytes_each):
            raise NotYet(
                what, "the answer is in bytes, not numbers: how wide is one number?", "times bytes_each"
            )
        raise NotYet(
            what, "how many messages does a rank send, and how long is each?", "2·(n-1) messages of P/n"
        )
    return "1 to 8 ranks, to the byte"


@exercise("0.2.2", "one mean over all ranks", returns=(int, float))
def global_mean(answer: Answer) -> str:
    for sums, counts in (([12.0, 3.0], [4, 3]), ([8.0, 0.0, 5.0], [2, 0, 10]), ([6.0, 6.0], [3, 3])):
        got, right = answer(list(sums), list(counts)), sum(sums) / sum(counts)
        if math.isclose(got, right, rel_tol=1e-6):
            continue
        what = f"got {got:.3f} for sums {sums} and counts {counts}, expected {right:.3f}"
        means = [s / c for s, c in zip(sums, counts, strict=True) if c]
        padded = [s / max(c, 1) for s, c in zip(sums, counts, strict=True)]
        if any(math.isclose(got, sum(m) / len(m), rel_tol=1e-6) for m in (means, padded)):
            raise NotYet(
                what,
                "a mean of means counts a target of a short rank more",
                "add up sums and counts first, then divide",
            )
        if math.isclose(got, sum(sums) / len(sums), rel_tol=1e-6):
            raise NotYet(what, "divide by the targets, not by the ranks", "sum of sums / sum of counts")
        raise NotYet(
            what, "what would one device compute that sees all targets?", "sum of sums / sum of counts"
        )
    try:
        empty = answer.fn([0.0, 0.0], [0, 0])
    except ZeroDivisionError:
        empty = None
    if empty != 0.0:
        raise NotYet("failed for counts [0, 0]", "there may be no targets at all: then the mean is 0.0")
    return "unequal and empty ranks too"


@exercise("0.2.3", "the diagnosis", returns=str)
def diagnose(answer: Answer) -> str:
    legal = ("fine", "divided twice", "not divided", "another bug")
    mixed = {"a": 1.0, "b": 4.0}
    cases = [
        ({"a": 1.0001, "b": 0.9999}, 4, "fine", "allow 1 % for rounding"),
        ({"a": 0.2501, "b": 0.2499}, 4, "divided twice", "which way round? 1/ranks is too small a gradient"),
        ({"a": 8.0, "b": 8.01}, 8, "not divided", "which way round? A factor `ranks` is too large"),
        (mixed, 4, "another bug", "one parameter is fine, another is not: look at every parameter"),
        ({"a": 0.25, "b": 0.31}, 4, "another bug", "look at every parameter: they do not share a factor"),
        ({"a": -1.0, "b": 1.0}, 2, "another bug", "look at every parameter: a sign is wrong"),
    ]
    for factors, ranks, right, hint in cases:
        got = answer(dict(factors), ranks)
        if got not in legal:
            raise NotYet(f"got {got!r}", f"return one of {', '.join(map(repr, legal))}")
        if got != right:
            raise NotYet(f"got {got!r} for {factors} on {ranks} ranks", hint, f"that is {right!r}")
    return f"{len(cases)} reports read right"
