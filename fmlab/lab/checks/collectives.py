"""Checkers of 1.10: an all-gather in few steps, the threshold between two algorithms, the odd call out."""

import math
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("1.10.1", "double what you hold", returns=list)
def doubling(answer: Answer) -> str:
    for n in (2, 4, 8, 16):
        steps = answer(n)
        _check_messages(steps, n)
        held = [{rank} for rank in range(n)]
        for number, step in enumerate(steps, start=1):
            _play(held, step, number, n)
        _check_end(held, steps, n)
    return "2, 4, 8 and 16 ranks, each block received once"


def _check_messages(steps: Any, n: int) -> None:
    for step in steps:
        for message in step:
            if not isinstance(message, tuple) or len(message) != 3:
                raise NotYet(
                    f"{message!r} is no message, for {n} ranks",
                    "a step is a list of (source, destination, blocks)",
                )
            if not {message[0], message[1]} <= set(range(n)) or message[0] == message[1]:
                raise NotYet(
                    f"a message from {message[0]} to {message[1]}, for {n} ranks",
                    f"source and destination are two different ranks of 0 to {n - 1}",
                )


def _play(held: list[set[int]], step: Any, number: int, n: int) -> None:
    before = [set(blocks) for blocks in held]
    for source, destination, blocks in step:
        where = f"{n} ranks, step {number}: {source} sends {sorted(blocks)} to {destination}"
        if not set(blocks) <= before[source]:
            raise NotYet(
                where,
                f"it does not hold that block yet: rank {source} has {sorted(before[source])}",
                "ranks that agree in all bits above the current one hold the same blocks",
            )
        if set(blocks) & held[destination]:
            raise NotYet(
                where,
                f"rank {destination} has that block already",
                "exchange with another rank in each step: the one whose number differs in the next bit",
            )
        held[destination] |= set(blocks)
    if sorted(message[0] for message in step) != list(range(n)):
        raise NotYet(
            f"{n} ranks, step {number} has {len(step)} messages",
            "in each step every rank sends one message and receives one",
        )


def _check_end(held: list[set[int]], steps: Any, n: int) -> None:
    missing = next((rank for rank in range(n) if len(held[rank]) < n), None)
    if missing is not None:
        raise NotYet(
            f"{n} ranks: at the end rank {missing} holds {sorted(held[missing])}",
            "pass on what came in the steps before, not only your own block",
            "after k steps a rank holds 2^k blocks, and sends all of them",
        )
    if len(steps) != n.bit_length() - 1:
        raise NotYet(
            f"{len(steps)} steps for {n} ranks",
            "it must take log2(n) steps",
            "what a rank holds has to double in every step",
        )


@exercise("1.10.2", "which algorithm, from which payload on?", returns=float)
def threshold(answer: Answer) -> str:
    for n, latency, bandwidth in ((8, 3e-6, 450e9), (3, 1e-3, 1e6), (64, 15e-6, 50e9)):
        scale = latency * bandwidth
        right = _threshold(2 * (n - 1) - 1, (n - 1) - 2 * (n - 1) / n) * scale
        got = answer(n, latency, bandwidth)
        if not math.isclose(got, right, rel_tol=1e-6):
            raise _wrong_threshold(got, right, n, scale)
    return "3, 8 and 64 ranks"


def _threshold(steps: float, volume: float) -> float:
    return steps / volume


def _wrong_threshold(got: float, right: float, n: int, scale: float) -> NotYet:
    what = f"got {got:.4g} bytes, not {right:.4g}, for {n} ranks"
    known = {
        _threshold(2 * (n - 1) - 1, abs(1 - 2 * (n - 1) / n)): (
            "one_shot sends n - 1 payloads, and one port carries all of its messages",
            "its volume is n - 1 payloads, not one",
        ),
        _threshold(2 * (n - 1), (n - 1) - 2 * (n - 1) / n): (
            "one_shot has a step, too",
            "the ring pays 2 (n - 1) - 1 latencies more",
        ),
        _threshold(2 * (n - 1) - 1, n - 1): (
            "the ring sends bytes, too: 2 (n - 1) / n payloads",
            "what it saves is the difference of the volumes",
        ),
        _threshold((n - 1) - 1, (n - 1) - (n - 1) / n): (
            "that is half a ring: an all-reduce is a reduce-scatter and an all-gather",
            "2 (n - 1) steps, and 2 (n - 1) / n payloads",
        ),
    }
    for value, hints in known.items():
        if math.isclose(got, value * scale, rel_tol=1e-6):
            return NotYet(what, *hints)
    return NotYet(
        what,
        "write both times as steps x latency + volume x payload / bandwidth",
        "set them equal and solve for the payload",
    )


_AGREE = [["broadcast", "all_reduce"]] * 4
_CASES: list[tuple[list[list[str]], tuple[int, list[int]] | None]] = [
    ([["all_reduce float32[4]"], ["all_reduce float32[5]"], ["all_reduce float32[4]"]], (0, [1])),
    ([["barrier", "all_gather"]] + [["barrier", "all_reduce"]] * 3, (1, [0])),  # rank 0 is the odd one
    ([["a", "b"], ["a"], ["a", "b"], ["a", "b"]], (1, [1])),  # one stopped
    ([["a"], ["a"], ["a", "b"], ["a"]], (1, [2])),  # one went on alone
    ([["a", "b", "c"], ["a", "c", "b"], ["a", "b", "d"]], (1, [1])),  # wrong twice
    ([["a"], ["a"], ["a"], ["b"], ["c"]], (0, [3, 4])),
    (_AGREE, None),
]


@exercise("1.10.3", "who called what?")
def first_mismatch(answer: Answer) -> str:
    for calls, right in _CASES:
        got = answer.call_unchecked([list(one) for one in calls])
        if got == right or (right and got and (got[0], list(got[1])) == right):
            continue
        raise _wrong_mismatch(got, right, calls)
    return "odd tensors, odd orders, ranks that stopped and a rank that went on"


def _wrong_mismatch(got: Any, right: tuple[int, list[int]] | None, calls: list[list[str]]) -> NotYet:
    what = f"got {got!r}, not {right!r}, for calls {calls}"
    if right is None:
        return NotYet(what, "return None if all agree")
    if got is None:
        return NotYet(
            what,
            "a rank that called nothing more has called None there, and the others have not",
            "go on to the longest list, not to the shortest",
        )
    if not isinstance(got, tuple) or len(got) != 2:
        return NotYet(what, "return (number of the call, list of ranks)")
    if got[0] != right[0]:
        return NotYet(what, "only the first number at which they disagree counts", "return there and then")
    return NotYet(
        what,
        "compare with what most ranks called, not with rank 0",
        "count how often each call appears at that number",
    )
