"""Exercises of 1.9, chips."""

import math
import random
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


def _least(inputs: int, outputs: int, itemsize: int, peak: float, bandwidth: float) -> int:
    """The least batch, by trying: doubling until computing is the limit, then halving the interval."""

    def computes(n: int) -> bool:
        moved = itemsize * (n * inputs + inputs * outputs + n * outputs)
        return 2 * n * inputs * outputs / peak >= moved / bandwidth

    high = 1
    while not computes(high):
        high *= 2
        if high > 2**60:
            return 0
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high


@exercise("1.9.1", "the smallest batch that computes", returns=int)
def smallest_batch(answer: Answer) -> str:
    cases = [
        (4096, 4096, 2, 989e12, 3.35e12),
        (768, 3072, 2, 459e12, 2.765e12),
        (8192, 1024, 4, 67e12, 3.35e12),
        (4096, 4096, 1, 1979e12, 3.35e12),
        (128, 128, 2, 989e12, 3.35e12),  # never: too narrow
        (1024, 1024, 4, 1e11, 2e10),
    ]
    for case in cases:
        right, got = _least(*case), answer(*case)
        if got == right:
            continue
        raise _wrong_batch(case, got, right)
    return f"{len(cases)} layers, one of them too narrow for its chip"


def _wrong_batch(case: tuple[int, int, int, float, float], got: int, right: int) -> NotYet:
    inputs, outputs, itemsize, peak, bandwidth = case
    what = f"got {got:,} tokens, not {right:,}, for {inputs} x {outputs}, {itemsize} bytes a number, "
    what += f"{peak:.3g} FLOP/s, {bandwidth:.3g} B/s"
    ridge = peak / bandwidth
    if right == 0:
        return NotYet(
            what,
            "no batch is large enough for this layer: each token brings its own bytes",
            "when a token's own numbers take longer than its FLOPs, return 0",
        )
    if got == math.ceil(ridge * itemsize / 2) and itemsize != 2:
        return NotYet(
            what, "the tokens' own numbers are moved too", "n·inputs + n·outputs numbers beside the weights"
        )
    if got in (math.floor(ridge), math.ceil(ridge)):
        if itemsize == 2:
            return NotYet(
                what,
                "the ridge is in FLOPs a byte: the tokens' own numbers are moved too, so it takes more",
                "set 2·n·inputs·outputs / peak equal to the bytes / bandwidth and solve for n",
            )
        return NotYet(what, "the ridge is in FLOPs a byte; how many bytes has a number?")
    if got == right - 1:
        return NotYet(what, "one token too few: there, moving still takes longer", "round up")
    gain = inputs * outputs / peak - itemsize * (inputs + outputs) / bandwidth
    if got == (0 if gain <= 0 else math.ceil(itemsize * inputs * outputs / bandwidth / gain)):
        return NotYet(what, "a multiply-add is two FLOPs", "a layer does 2·n·inputs·outputs FLOPs")
    return NotYet(
        what,
        "write down both times for n tokens and set them equal",
        "2·n·inputs·outputs / peak = itemsize·(n·inputs + inputs·outputs + n·outputs) / bandwidth",
    )


SHEETS: list[dict[str, Any]] = [
    dict(tflops=624, sparse=True, per="chip", cores=1, memory=80, memory_unit="GiB", link=600,
         link_unit="GB/s", both_ways=True),
    dict(tflops=79, sparse=False, per="core", cores=8, memory=96, memory_unit="GiB", link=512,
         link_unit="GB/s", both_ways=False),
    dict(tflops=459, sparse=False, per="chip", cores=2, memory=95, memory_unit="GB", link=4800,
         link_unit="Gbit/s", both_ways=False),
    dict(tflops=320, sparse=True, per="core", cores=4, memory=64, memory_unit="GB", link=9600,
         link_unit="Gbit/s", both_ways=True),
]  # fmt: skip


@exercise("1.9.2", "read a data sheet", returns=dict)
def read_sheet(answer: Answer) -> str:
    for sheet in SHEETS:
        flops = sheet["tflops"] * 1e12 / (1 + sheet["sparse"])
        flops *= sheet["cores"] if sheet["per"] == "core" else 1
        link = sheet["link"] * (1e9 if sheet["link_unit"] == "GB/s" else 1.25e8) / (1 + sheet["both_ways"])
        memory = sheet["memory"] * (2**30 if sheet["memory_unit"] == "GiB" else 1e9)
        right = {"flops": flops, "memory": memory, "link": link}
        got = answer(dict(sheet))
        if set(got) != set(right):
            raise NotYet(f"got the keys {sorted(got)}", "the keys are flops, memory and link")
        for key, value in right.items():
            if not math.isclose(got[key], value, rel_tol=1e-9):
                raise _wrong_figure(key, got[key], value, sheet)
    return f"{len(SHEETS)} sheets: sparse and dense, cores and chips, bits and bytes"


def _wrong_figure(key: str, got: float, right: float, sheet: dict[str, Any]) -> NotYet:
    what = f"{key} is {got:.4g}, not {right:.4g}, for {sheet}"
    ratio = got / right
    doubled, cores = 2.0 * sheet["sparse"], sheet["cores"]
    hints: dict[str, list[tuple[float, str]]] = {
        "flops": [
            (doubled, "a sparse rate counts products with zeros that are never done: halve it"),
            (1 / cores, "the rate is that of one core; how many has the chip?"),
            (float(cores), "the rate is that of the chip already, whatever its cores"),
            (doubled / cores, "sparse, and of one core: both must be undone"),
        ],
        "memory": [
            (1e9 / 2**30, "a GiB has 2^30 bytes"),
            (2**30 / 1e9, "a GB has 10^9 bytes; 2^30 is a GiB"),
        ],
        "link": [
            (8.0, "Gbit/s are bits: a byte has eight bits"),
            (2.0, "that is both directions together; we want one direction"),
            (16.0, "a byte has eight bits, and we want one direction"),
            (0.5, "this figure is one direction already"),
        ],
    }
    for factor, hint in hints[key]:
        if factor and math.isclose(ratio, factor, rel_tol=1e-6):
            return NotYet(what, hint, "read the docstring once more, field by field")
    return NotYet(what, f"it is {ratio:.4g} times what it should be", "convert one field at a time")


@exercise("1.9.3", "own times of a trace", returns=dict)
def own_times(answer: Answer) -> str:
    traces = [
        [("step", 0.0, 100.0), ("linear", 10.0, 40.0), ("addmm", 15.0, 30.0), ("gelu", 60.0, 20.0)],
        [("step", 0.0, 50.0), ("mm", 0.0, 20.0), ("mm", 20.0, 25.0), ("copy", 45.0, 5.0)],
        [
            ("call", 0.0, 30.0),
            ("call", 5.0, 20.0),
            ("call", 10.0, 5.0),
            ("mm", 40.0, 9.0),
            ("copy", 42.0, 3.0),
        ],
    ]
    for number, events in enumerate([traces[0], traces[1], traces[2], _shuffled(traces[0])]):
        right, got = _own(events), answer(list(events))
        if {name: round(float(time), 6) for name, time in got.items()} == right:
            continue
        what = f"got {got}, not {right}, for {events}"
        whole: dict[str, float] = {}
        for name, _, duration in events:
            whole[name] = whole.get(name, 0.0) + duration
        if got == whole:
            raise NotYet(
                what,
                "an operator's own time leaves out those that it calls",
                "keep a stack of the events that have not ended; subtract from the innermost",
            )
        if number == 3:
            raise NotYet(what, "the events come in any order", "sort them by start, the longer first")
        if number == 1:
            raise NotYet(
                what,
                "an event that begins where another ends is not inside it",
                "an event has ended when the next one's start is at or after its end",
            )
        raise NotYet(
            what,
            "subtract only the events directly inside: those inside them are counted by them",
            "keep a stack of the events that have not ended; subtract from the innermost",
        )
    return "nested, adjacent, recursive and unordered events"


def _own(events: list[tuple[str, float, float]]) -> dict[str, float]:
    from fmlab.lab.trace import nested

    total: dict[str, float] = {}
    for span in nested(events):
        total[span.name] = total.get(span.name, 0.0) + span.own * 1e6
    return {name: round(time, 6) for name, time in total.items()}


def _shuffled(events: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    mixed = list(events)
    random.Random(3).shuffle(mixed)
    return mixed
