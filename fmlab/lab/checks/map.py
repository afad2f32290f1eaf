"""Checkers of notebook 0.3."""

import math
from collections.abc import Sequence
from itertools import pairwise

from fmlab.lab.exercises import Answer, NotYet, exercise

LAYERS = ("front end", "graph", "kernels", "bits", "states", "wires")
Event = tuple[str, str, float]
RECORDS: tuple[tuple[list[Event], float], ...] = (
    ([("addmm", "forward", 3.0), ("gelu", "forward", 1.0), ("mm", "backward", 5.0)], 9.0),
    (
        [
            ("_to_copy", "forward", 0.5),
            ("bmm", "forward", 2.0),
            ("_flash_attention_forward", "forward", 1.5),
            ("native_layer_norm", "forward", 0.75),
            ("_flash_attention_backward", "backward", 4.0),
            ("gelu_backward", "backward", 0.5),
        ],
        10.0,
    ),
    (
        [
            ("mm", "backward", 6.0),
            ("all_reduce", "backward", 2.0),
            ("mul", "optimizer", 0.5),
            ("addcmul", "optimizer", 0.5),
            ("_to_copy", "optimizer", 0.25),
            ("mm", "optimizer", 1.0),
        ],
        12.5,
    ),
)


@exercise("0.3.1", "whose time is it?", returns=dict)
def time_by_layer(answer: Answer) -> str:
    for events, seconds in RECORDS:
        got, right = answer(list(events), seconds), _by_layer(events, seconds)
        missing = [layer for layer in LAYERS if layer not in got]
        if missing:
            raise NotYet(
                f"there is no {missing[0]!r} in the result",
                "all six layers are in it, those without time too",
                "begin with dict.fromkeys(the six names, 0.0)",
            )
        wrong = [layer for layer in LAYERS if not math.isclose(got[layer], right[layer], abs_tol=1e-9)]
        if wrong:
            raise _misplaced(wrong, got, right, events, seconds)
    return f"{len(RECORDS)} steps, every second has its layer"


def _by_layer(events: Sequence[Event], seconds: float) -> dict[str, float]:
    found = dict.fromkeys(LAYERS, 0.0)
    for operator, phase, spent in events:
        if phase == "optimizer":
            found["states"] += spent
        elif operator in ("mm", "addmm", "bmm") or "attention" in operator:
            found["kernels"] += spent
        else:
            found[{"_to_copy": "bits", "all_reduce": "wires"}.get(operator, "graph")] += spent
    found["front end"] = seconds - sum(found.values())
    return found


def _misplaced(
    wrong: list[str], got: dict[str, float], right: dict[str, float], events: Sequence[Event], seconds: float
) -> NotYet:
    layer = wrong[0] if wrong != ["front end"] else "front end"
    what = f"{layer} has {got[layer]:g} s, not {right[layer]:g} s, in a step of {seconds:g} s with {events}"
    if "states" in wrong:
        return NotYet(
            what,
            "the phase comes first: what runs in the update belongs to the states, whatever it is called",
            'ask for phase == "optimizer" before you look at the name',
        )
    if wrong == ["front end"]:
        return NotYet(
            what,
            "the chip is idle where no event runs: the step is longer than its events together",
            "the front end's time is seconds minus the sum of all events",
        )
    if "kernels" in wrong:
        return NotYet(
            what,
            "which operators are matrix products, and which attention?",
            'mm, addmm and bmm by name, attention by `"attention" in operator`, backward too',
        )
    return NotYet(what, "read the rules in the docstring from top to bottom", "the first rule that fits wins")


Spans = list[tuple[float, float]]
STEPS: tuple[tuple[Spans, Spans], ...] = (
    ([(0.0, 10.0)], [(6.0, 13.0)]),
    ([(0.0, 4.0), (6.0, 9.0)], [(1.0, 2.0), (3.0, 7.0), (8.0, 12.0)]),
    ([(5.0, 9.0), (0.0, 4.0)], [(20.0, 25.0), (2.0, 3.0)]),
    ([(0.0, 5.0)], [(4.0, 10.0), (7.0, 12.0), (8.0, 9.0)]),
    ([(0.0, 6.0), (2.0, 8.0)], [(1.0, 9.0)]),
    ([], [(1.0, 3.0), (3.0, 4.0)]),
    ([(0.0, 3.0)], []),
)


@exercise("0.3.2", "what is not hidden?", returns=float)
def exposed(answer: Answer) -> str:
    for computing, messages in STEPS:
        got, right = answer(list(computing), list(messages)), _exposed(computing, messages)
        if math.isclose(got, right, abs_tol=1e-9):
            continue
        what = f"got {got:g}, not {right:g}, for computing {computing} and messages {messages}"
        if messages and math.isclose(got, _length(messages)):
            raise NotYet(
                what,
                "a message that travels while the chip computes costs nothing",
                "take away what both cover",
            )
        ends = [end for _, end in (*computing, *messages)]
        if math.isclose(got, max(ends, default=0.0) - _length(computing)):
            raise NotYet(
                what,
                "a chip that does nothing while nothing travels waits for something else",
                "count only the time in which a message is under way",
            )
        if sum(end - start for start, end in messages) != _length(messages):
            raise NotYet(
                what,
                "two messages may be under way at once: that second counts once",
                "time covered by either, minus time covered by computing, each without counting twice",
            )
        if sum(end - start for start, end in computing) != _length(computing):
            raise NotYet(
                what,
                "two computations may run at once (two streams): a second is hidden once",
                "first join intervals that overlap",
            )
        raise NotYet(
            what,
            "walk through the pieces of time between all starts and ends",
            "a piece counts if a message covers it and no computation does",
        )
    return f"{len(STEPS)} steps: hidden, late, overlapping and without order"


def _pieces(spans: Sequence[tuple[float, float]], edges: Sequence[float]) -> set[float]:
    """Where the pieces of time begin that are covered."""
    return {edge for edge in edges if any(start <= edge < end for start, end in spans)}


def _exposed(computing: Spans, messages: Spans) -> float:
    edges = sorted({edge for span in (*computing, *messages) for edge in span})
    lengths = {start: end - start for start, end in pairwise(edges)}
    alone = _pieces(messages, edges) - _pieces(computing, edges)
    return float(sum(lengths[start] for start in alone))


def _length(spans: Spans) -> float:
    return _exposed([], spans)


Operator = tuple[float, float, float]
PEAK, BANDWIDTH = 100.0, 1.0
CHAINS: tuple[list[Operator], ...] = (
    [(0.0, 8.0, 8.0), (0.0, 8.0, 2.0), (0.0, 2.0, 2.0)],
    [(4000.0, 9.0, 12.0), (4000.0, 12.0, 9.0), (0.0, 9.0, 6.0), (0.0, 100.0, 6.0)],
    [(0.0, 1.0, 4.0), (0.0, 4.0, 30.0), (60_000.0, 40.0, 5.0), (0.0, 5.0, 5.0), (0.0, 25.0, 20.0)],
    [(0.0, 30.0, 1.0), (0.0, 31.0, 1.0), (0.0, 1.0, 6.0), (0.0, 6.0, 1.0)],
    [(0.0, 9.0, 11.0), (0.0, 25.0, 9.0), (0.0, 9.0, 10.0), (2500.0, 21.0, 1.0)],
)


@exercise("0.3.3", "fuse where it pays", returns=int)
def best_pair(answer: Answer) -> str:
    for chain in CHAINS:
        got, gains = answer(list(chain), PEAK, BANDWIDTH), _gains(chain)
        if not 0 <= got < len(gains):
            raise NotYet(f"got {got}", f"the pairs begin at 0 … {len(gains) - 1}, for {len(chain)} operators")
        if math.isclose(gains[got], max(gains)):
            continue
        what = f"got {got}, which saves {gains[got]:g} s, for {chain}; another pair saves {max(gains):g} s"
        between = [written for _, _, written in chain[:-1]]
        if between[got] == max(between):
            raise NotYet(
                what,
                "fewer bytes save time only where bytes are the limit",
                "time is max(FLOPs / peak, bytes / bandwidth), apart and fused; compare those",
            )
        whole = [_seconds(*a) + _seconds(*b) for a, b in pairwise(chain)]
        if whole[got] == max(whole):
            raise NotYet(
                what,
                "the slowest pair is not the one that gains most",
                "what is read from elsewhere is still read when two are fused",
            )
        raise NotYet(
            what,
            "what passes between them is neither written nor read any more: it counts twice",
            "bytes fused = read first + written second + (read second - written first)",
        )
    return f"{len(CHAINS)} chains, the best pair in each"


def _seconds(flops: float, read: float, written: float) -> float:
    return max(flops / PEAK, (read + written) / BANDWIDTH)


def _gains(chain: Sequence[Operator]) -> list[float]:
    found = []
    for (f, r, w), (g, s, v) in pairwise(chain):
        found.append(_seconds(f, r, w) + _seconds(g, s, v) - _seconds(f + g, r + s - w, v))
    return found
