"""Checkers of notebook 2.2."""

import math
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

MODELS = (
    ([("a", 40), ("b", 30), ("c", 10), ("d", 20), ("e", 5)], 60),
    ([("small", 8), ("huge", 500), ("x", 30), ("y", 30), ("z", 1)], 60),
    ([("only", 100)], 10),
)


@exercise("2.2.1", "plan the buckets", returns=list)
def buckets_of(answer: Answer) -> str:
    for sizes, limit in MODELS:
        right = _plan(sizes, limit)
        got = [list(bucket) for bucket in answer(list(sizes), limit)]
        if got == right:
            continue
        what = f"got {got} for {sizes} with a limit of {limit}"
        names = [name for bucket in got for name in bucket]
        bytes_of = dict(sizes)
        if sorted(names) != sorted(bytes_of):
            raise NotYet(
                what, "each gradient must be in exactly one bucket", "also one that is larger than the limit"
            )
        if names != [name for name, _ in reversed(sizes)]:
            raise NotYet(
                what,
                "which gradient does the backward pass make first?",
                "go through the list from its end, and keep that order",
            )
        for bucket in got:
            if len(bucket) > 1 and sum(bytes_of[name] for name in bucket) > limit:
                raise NotYet(
                    what,
                    f"{bucket} holds more than {limit} bytes: look before you put a gradient in",
                    "if it does not fit, begin a new bucket with it",
                )
        if [] in got:
            raise NotYet(
                what, "an empty bucket would send an empty message", "begin a bucket with a gradient"
            )
        raise NotYet(
            what,
            "a bucket was closed although there is room for the next gradient",
            "close it only when the next one would lift it over the limit",
        )
    return "small, huge and single gradients"


def _plan(sizes: list[tuple[str, int]], limit: int) -> list[list[str]]:
    plan: list[list[str]] = []
    filled = 0
    for name, size in reversed(sizes):
        if not plan or filled + size > limit:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += size
    return plan


@exercise("2.2.2", "combine unequal ranks")
def combine(answer: Answer) -> str:
    import torch

    torch.manual_seed(22)
    for counts in ([3, 3], [100, 1, 7], [5, 0, 20, 0]):
        gradients = [torch.randn(6) if count else torch.full((6,), math.nan) for count in counts]
        terms = [g * count for g, count in zip(gradients, counts, strict=True) if count]
        right = torch.stack(terms).sum(0) / sum(counts)
        means = torch.stack([g for g, count in zip(gradients, counts, strict=True) if count])
        got = answer([g.clone() for g in gradients], list(counts))
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got {type(got).__name__} of shape {tuple(getattr(got, 'shape', ()))} for counts {counts}",
                "the result is one gradient, of the same shape as each",
            )
        if not torch.allclose(got, right, rtol=1e-4, atol=1e-6):
            raise _wrong_combination(got, right, means, counts)
    return "equal, unequal and empty ranks"


def _wrong_combination(got: Any, right: Any, means: Any, counts: list[int]) -> NotYet:
    import torch

    if got.isnan().any():
        return NotYet(
            f"got nan for counts {counts}", "0 times nan is nan", "leave out the ranks that have no targets"
        )
    factor = (got @ right / (right @ right)).item()
    what = f"got {factor:.3g} times the right gradient for counts {counts}"
    if len(set(counts)) > 1 and torch.allclose(got, means.mean(0), rtol=1e-4):
        return NotYet(
            f"wrong for counts {counts}",
            "that is the mean of the means: every rank weighs the same",
            "every target should weigh the same",
        )
    if math.isclose(factor, sum(counts), rel_tol=1e-3):
        return NotYet(what, "that is the gradient of the sum of all losses", "divide by all targets, once")
    if 0 in counts:
        return NotYet(
            what,
            "a rank without targets is not a rank less: its weight is 0 already",
            "a rank's weight is its count divided by the sum of counts",
        )
    return NotYet(
        what,
        "the gradient of a rank's summed loss is its count times the gradient of its mean",
        "add up the sums, then divide by the sum of counts",
    )


@exercise("2.2.3", "how long does the step wait?", returns=float)
def waiting(answer: Answer) -> str:
    for ready, seconds, backward in (
        ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 3.0),  # the wire is the slower one
        ([1.0, 4.0, 6.0], [0.5, 0.5, 1.0], 6.0),  # the wire is idle in between
        ([1.0, 2.0, 3.0], [0.5, 0.5, 0.5], 5.0),  # all have arrived
    ):
        free = 0.0
        for full, duration in zip(ready, seconds, strict=True):
            free = max(free, full) + duration
        right = max(0.0, free - backward)
        got = answer(list(ready), list(seconds), backward)
        if math.isclose(got, right, abs_tol=1e-9):
            continue
        what = f"got {got:g} s, not {right:g}, for ready={ready}, seconds={seconds}, backward={backward}"
        if got < 0:
            raise NotYet(what, "a step cannot wait less than 0 seconds", "use max(0.0, …)")
        parallel = max(full + duration for full, duration in zip(ready, seconds, strict=True)) - backward
        if math.isclose(got, sum(seconds)):
            raise NotYet(
                what, "that is the whole time on the wire, as if the backward pass hides nothing", "draw it"
            )
        if math.isclose(got, max(0.0, parallel)):
            raise NotYet(
                what,
                "the wire carries buckets one at a time",
                "a bucket starts when the one before has arrived",
            )
        if math.isclose(got, max(0.0, ready[0] + sum(seconds) - backward)):
            raise NotYet(
                what,
                "a bucket cannot leave before it is full",
                "it starts at max(wire is free, bucket is full)",
            )
        raise NotYet(
            what, "follow the wire: when is it free again?", "it starts at max(wire is free, bucket is full)"
        )
    return "a slow wire, an idle one, and one that is done in time"
