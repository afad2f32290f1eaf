"""Checkers of notebook 1.11. They run without torch_xla."""

import math
import random
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

LIMIT = 0.15  # of all positions
# Where lengths gather (centre, spread, weight), and the longest that can be.
SOURCES = (
    (((22, 2, 6), (60, 3, 3), (120, 3, 2)), 128),
    (((14, 1, 8), (90, 4, 2), (246, 4, 2)), 256),
    (((30, 1, 1), (42, 2, 1), (490, 8, 2)), 512),
)


def _rows(source: Any, longest: int, count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    centres, weights = [part[:2] for part in source], [part[2] for part in source]
    picked = draw.choices(centres, weights, k=count)
    return [min(longest, max(4, round(draw.gauss(*part)))) for part in picked]


@exercise("1.11.1", "three buckets", returns=list)
def three_buckets(answer: Answer) -> str:
    worst = 0.0
    for number, (source, longest) in enumerate(SOURCES):
        sample = _rows(source, longest - 2, 200, number)
        hidden = [*_rows(source, longest, 5000, 100 + number), longest]
        got = list(answer(list(sample), longest))
        what = f"got {got} for rows of up to {longest} tokens"
        if len(got) > 3:
            raise NotYet(
                f"{len(got)} buckets: {len(got)} programs", "each bucket is a program; three are allowed"
            )
        if not got or any(not isinstance(b, int) or b < 1 for b in got) or got != sorted(set(got)):
            raise NotYet(what, "return whole lengths, in rising order")
        if got[-1] < longest:
            raise NotYet(
                what,
                "a later row may be as long as `longest`, and would not fit",
                "the last bucket is given: `longest`; choose the two others",
            )
        waste = _waste(got, hidden)
        worst = max(worst, waste)
        if waste >= LIMIT:
            raise _too_much(f"{what}: {100 * waste:.0f} % padding", got, sample, longest)
    return f"at most 3 programs and {100 * worst:.0f} % padding, on 15,000 rows from three sources"


def _waste(buckets: list[int], rows: list[int]) -> float:
    return 1 - sum(rows) / sum(next(b for b in buckets if row <= b) for row in rows)


def _too_much(what: str, got: list[int], sample: list[int], longest: int) -> NotYet:
    plain = "try each pair of lengths of the sample as the two lower buckets; keep the one that pads least"
    if len(got) < 3:
        return NotYet(what, "three buckets are allowed; use them all", plain)
    if abs(got[0] - longest / 3) < 2 and abs(got[1] - 2 * longest / 3) < 2:
        return NotYet(what, "buckets of equal width do not look at the rows: where do they gather?", plain)
    shares = [sum(row <= bucket for row in sample) / len(sample) for bucket in got]
    if abs(shares[0] - 1 / 3) < 0.1 and abs(shares[1] - 2 / 3) < 0.1:
        return NotYet(what, "that many rows share a bucket does not make them of one length", plain)
    return NotYet(what, "a bucket should end just above where many rows end", plain)


EPOCHS: tuple[tuple[list[int], int, list[int], bool], ...] = (
    ([64] * 8551, 8, [64], False),
    ([64] * 8551, 8, [64], True),
    ([10, 20, 30, 40, 50, 60, 70, 80], 2, [32, 64, 128, 256], False),
    ([12, 90, 14, 88, 91, 13], 2, [16, 96], True),
    ([5, 9, 33, 31, 60, 2, 7], 3, [8, 16, 64], False),
    ([5, 9, 33, 31, 60, 2, 7], 3, [8, 16, 64], True),
)


@exercise("1.11.2", "count the programs", returns=int)
def count_programs(answer: Answer) -> str:
    for lengths, size, buckets, drop in EPOCHS:
        seen, by_row, ignoring = set(), set(), set()
        for start in range(0, len(lengths), size):
            batch = lengths[start : start + size]
            if drop and len(batch) < size:
                continue
            bucket = min(b for b in buckets if b >= max(batch))
            seen.add((len(batch), bucket))
            ignoring.add(bucket)
            by_row |= {(len(batch), min(b for b in buckets if b >= row)) for row in batch}
        got = answer(list(lengths), size, list(buckets), drop)
        if got == len(seen):
            continue
        rows = f"{len(lengths)} rows" if len(lengths) > 20 else str(lengths)
        what = f"got {got}, not {len(seen)}, for {rows}, batch_size={size}, {buckets=}, drop_last={drop}"
        partial = len(lengths) % size > 0
        if got == len(by_row):
            raise NotYet(what, "a batch is as long as its longest row", "take the bucket of max(batch)")
        if drop and partial and got > len(seen):
            raise NotYet(what, "drop_last leaves the partial batch out", "it has fewer rows than batch_size")
        if partial and got == len(ignoring):
            raise NotYet(
                what, "another number of rows is another shape", "count distinct (rows, bucket) of batches"
            )
        if got >= len(buckets):
            raise NotYet(
                what, "a bucket that no batch falls into is never compiled", "count what the batches need"
            )
        raise NotYet(what, "write down (rows, bucket) of each batch; how many are distinct?")
    return f"{len(EPOCHS)} epochs, all exact"


class _Loss:
    """A loss on a device: arithmetic notes down, float() reads, and reads are counted."""

    def __init__(self, value: float, reads: list[int]) -> None:
        self.value, self.reads = value, reads

    def __add__(self, other: Any) -> "_Loss":
        return _Loss(self.value + getattr(other, "value", other), self.reads)

    __radd__ = __add__

    def __truediv__(self, other: float) -> "_Loss":
        return _Loss(self.value / other, self.reads)

    def __mul__(self, other: float) -> "_Loss":
        return _Loss(self.value * other, self.reads)

    __rmul__ = __mul__

    def detach(self) -> "_Loss":
        return self

    def __float__(self) -> float:
        self.reads.append(1)
        return self.value

    def item(self) -> float:
        return float(self)

    tolist = item


@exercise("1.11.3", "log without waiting", returns=list)
def window_means(answer: Answer) -> str:
    for count, every in ((6, 3), (7, 3), (5, 1), (2, 4)):
        values = [3.0 / (1 + at) for at in range(count)]
        reads: list[int] = []
        done: list[int] = []

        def step(batch: int, values: list[float] = values, reads: Any = reads, done: Any = done) -> _Loss:
            done.append(batch)
            return _Loss(values[batch], reads)

        got = list(answer(step, list(range(count)), every))
        windows = [values[start : start + every] for start in range(0, count, every)]
        right = [sum(window) / len(window) for window in windows]
        what = f"got {got} for {count} steps in windows of {every}"
        if done != list(range(count)) and len(got) == len(windows):
            raise NotYet(what, "call step once for each batch, in order")
        if len(got) != len(windows):
            raise NotYet(what, f"there are {len(windows)} windows: a window is missing, or one too many")
        if any(isinstance(mean, _Loss) for mean in got):
            raise NotYet("got losses of the device", "return floats: float(mean)")
        if not all(math.isclose(a, b) for a, b in zip(got, right, strict=True)):
            if got == [window[-1] for window in windows]:
                raise NotYet(what, "the loss of one step is not the mean of the window", "add them up")
            if math.isclose(got[0], right[0]) and len(windows[-1]) < every:
                raise NotYet(what, "the last window has fewer steps", "divide by the length of the window")
            raise NotYet(what, "the last window has fewer steps; divide each sum by its own length")
        if len(reads) > len(windows):
            raise NotYet(
                f"{len(reads)} reads in {len(windows)} windows",
                "the host waits at every step" if len(reads) >= count else "the host waits too often",
                "add losses up on the device, and call float() on the mean of a window",
            )
    return "one read a window, also for a short last one"
