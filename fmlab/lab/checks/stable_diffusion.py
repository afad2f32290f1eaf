"""Checkers of notebook 3.6."""

import math
import random
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

Blocks = list[tuple[list[str], dict[str, int]]]


def _sent(blocks: Blocks, cut: int) -> int:
    before = {name: size for _, writes in blocks[:cut] for name, size in writes.items()}
    needed: set[str] = set()
    anew: set[str] = set()
    for reads, writes in blocks[cut:]:
        needed |= set(reads) - anew
        anew |= set(writes)
    return sum(before[name] for name in needed if name in before)


#: blocks, cut, what a wrong number there shows
CUTS: list[tuple[Blocks, int, tuple[str, ...]]] = [
    (
        [(["x"], {"h": 7}), (["h"], {"h": 5, "unused": 100}), (["h"], {"y": 3})],
        2,
        ("a tensor that nobody reads after the cut was counted, or the stream was not", "nobody reads it"),
    ),
    (
        [(["x"], {"h": 7, "skip": 11}), (["h"], {"h": 5}), (["h"], {"h": 5}), (["h", "skip"], {"y": 3})],
        2,
        ("blocks far behind read what blocks far before wrote", "skips cross the cut, too"),
    ),
    (
        [(["x"], {"h": 7, "t": 2}), (["h", "t"], {"h": 5}), (["h", "t"], {"h": 5}), (["t"], {"y": 3})],
        1,
        ("two blocks read the same tensor", "it is sent once"),
    ),
    (
        [(["x"], {"h": 7, "s": 4}), (["h"], {"s": 6, "h": 1}), (["s", "h"], {"y": 3})],
        1,
        ("one is overwritten before it is read", "a name that is written anew behind the cut is not sent"),
    ),
]


@exercise("3.6.1", "what a cut sends")
def sent(answer: Answer) -> str:
    def check(blocks: Blocks, cut: int, hints: tuple[str, ...]) -> None:
        got = answer([(list(reads), dict(writes)) for reads, writes in blocks], cut)
        if got != (wanted := _sent(blocks, cut)):
            raise NotYet(f"{got!r} bytes at cut {cut} of {len(blocks)} blocks, {wanted} are sent", *hints)

    for case in CUTS:
        check(*case)
    numbers = random.Random(3)
    names = ["h", "a", "b", "c", "d"]
    for _ in range(50):
        blocks = [
            (
                numbers.sample(names, numbers.randint(1, 3)),
                {name: numbers.randint(1, 9) for name in numbers.sample(names, numbers.randint(1, 3))},
            )
            for _ in range(numbers.randint(2, 6))
        ]
        hints = ("walk over the blocks behind the cut in order", "a name counts until it is written anew")
        check(blocks, numbers.randint(1, len(blocks) - 1), hints)
    return f"{len(CUTS) + 50} cuts, exact"


def _padding(requests: list[tuple[int, float]], sizes: list[int]) -> tuple[int, float]:
    sizes, used, real, run = sorted(sizes), set(), 0, 0
    for pictures, scale in requests:
        rows = pictures if scale == 1 else 2 * pictures
        real += rows
        while rows > 0:
            size = next((size for size in sizes if size >= rows), sizes[-1])
            used.add(size)
            run += size
            rows -= size
    return len(used), (run - real) / run


#: requests, sizes, hints
SERVICES: list[tuple[list[tuple[int, float]], list[int], tuple[str, ...]]] = [
    (
        [(1, 7.5), (2, 1.0)],
        [2],
        ("guidance runs the UNet with and without the caption", "two rows a picture"),
    ),
    ([(1, 1.0), (3, 1.0)], [4], ("of what is padding a share?", "a share of all rows that run")),
    ([(3, 1.0), (3, 1.0)], [2, 4, 8], ("which programs are used?", "count those that run at least once")),
    ([(1, 1.0), (2, 2.0)], [8, 2, 4], ("sizes come in any order", "sort them first")),
    ([(5, 7.5), (1, 1.0)], [4, 1], ("ten rows do not fit", "the largest again and again, then the rest")),
]


@exercise("3.6.2", "padded guidance", returns=tuple)
def padding(answer: Answer) -> str:
    def check(requests: list[tuple[int, float]], sizes: list[int], hints: tuple[str, ...]) -> None:
        got: Any = answer(list(requests), list(sizes))
        programs, share = _padding(requests, sizes)
        right = len(got) == 2 and got[0] == programs and _close(got[1], share)
        if not right:
            raise NotYet(
                f"{got!r} for requests {requests} and sizes {sizes}; ({programs}, {share:.3f}) is right",
                *hints,
            )

    for case in SERVICES:
        check(*case)
    numbers = random.Random(5)
    for _ in range(40):
        requests = [(numbers.randint(1, 6), numbers.choice([1.0, 7.5])) for _ in range(numbers.randint(1, 5))]
        sizes = numbers.sample([1, 2, 3, 4, 6, 8], numbers.randint(1, 3))
        check(requests, sizes, ("go through one request by hand", "while rows are left, take a size"))
    return f"{len(SERVICES) + 40} services, exact"


def _close(got: Any, wanted: float) -> bool:
    try:
        return math.isclose(float(got), wanted, rel_tol=1e-9, abs_tol=1e-12)
    except (TypeError, ValueError):
        return False


def _average(weights: list[float], decay: float, first: int = 2, warm: bool = True) -> float:
    kept = weights[0]
    for n, weight in enumerate(weights[1:], start=first):
        share = min(decay, (1 + n) / (10 + n)) if warm else decay
        kept = share * kept + (1 - share) * weight
    return kept


@exercise("3.6.3", "the average of the weights")
def average(answer: Answer) -> str:
    numbers = random.Random(7)
    for decay, count in ((0.9, 4), (0.999, 30), (0.2, 8), (0.9, 1)):
        weights = [numbers.gauss(0, 1) for _ in range(count)]
        got, wanted = answer(list(weights), decay), _average(weights, decay)
        if _close(got, wanted):
            continue
        what = f"{got!r} for {count} weights and decay {decay}, not {wanted:.4f}"
        if _close(got, _average(weights, decay, warm=False)):
            raise NotYet(what, "in early steps the old average counts less than decay")
        if _close(got, _average(weights, decay, first=1)):
            raise NotYet(what, "which step does the second weight belong to? steps count from 1")
        raise NotYet(
            what, "which of the two does the share belong to?", "to the old average; the weight: the rest"
        )
    return "4 runs, exact"
