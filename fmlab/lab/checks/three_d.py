"""Checkers of notebook 2.8: the groups of an axis, one norm over a grid, degrees that fit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

MEGATRON = ("tensor", "data", "pipeline")

#: sizes of the axes, their order (fastest first)
GRIDS: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    ({"tensor": 2, "data": 2, "pipeline": 2}, MEGATRON),
    ({"tensor": 4, "data": 2, "pipeline": 3}, MEGATRON),
    ({"tensor": 2, "data": 3, "pipeline": 4}, ("pipeline", "tensor", "data")),
    ({"data": 4, "tensor": 2, "pipeline": 1}, ("data", "tensor", "pipeline")),
)


@exercise("2.8.1", "the groups of an axis", returns=list)
def groups(answer: Answer) -> str:
    for sizes, order in GRIDS:
        for axis in sizes:
            right = _groups(sizes, order, axis)
            got = [list(group) for group in answer(dict(sizes), list(order), axis)]
            if got != right:
                raise _wrong_groups(got, right, sizes, order, axis)
    return f"{len(GRIDS)} grids, every axis, three orders"


def _groups(sizes: Mapping[str, int], order: Sequence[str], axis: str) -> list[list[int]]:
    stride = math.prod(sizes[name] for name in order[: order.index(axis)])
    size, ranks = sizes[axis], math.prod(sizes.values())
    firsts = (rank for rank in range(ranks) if rank // stride % size == 0)
    return [[first + i * stride for i in range(size)] for first in firsts]


def _wrong_groups(
    got: list[list[int]], right: list[list[int]], sizes: Mapping[str, int], order: Sequence[str], axis: str
) -> NotYet:
    shape = ", ".join(f"{name}={sizes[name]}" for name in order)
    shown = f"{got[:3]}{' ...' if len(got) > 3 else ''}"
    what = f"got {shown} for {axis} of ({shape}), the first is the fastest"
    ranks = math.prod(sizes.values())
    if sorted(map(sorted, got)) == right:
        return NotYet(what, "the right groups in another order", "sort them by their first rank")
    if got == _groups(sizes, order[::-1], axis):
        return NotYet(
            what,
            "that is the order read backwards: the last axis runs fastest",
            "ranks 0 and 1 differ along the first axis",
        )
    each = sizes[axis]
    if got == [list(range(first, first + each)) for first in range(0, ranks, each)]:
        return NotYet(
            what,
            "neighbours in number are neighbours along the first axis only",
            "along other axes ranks are a stride apart: the product of the sizes before it",
        )
    if sorted(rank for group in got for rank in group) != list(range(ranks)):
        return NotYet(
            what,
            f"each of the {ranks} ranks is in exactly one group",
            "a group begins at each rank whose coordinate along the axis is 0: rank // stride % size == 0",
        )
    return NotYet(
        what,
        f"a group has {each} ranks, a stride apart",
        "the stride is the product of the sizes before the axis",
    )


@exercise("2.8.2", "one norm over the grid", returns=float)
def global_norm(answer: Answer) -> str:
    for name, ranks, places, divided, right in _gradients():
        given = [{key: piece.clone() for key, piece in held.items()} for held in ranks]
        got = answer(
            given, [dict(place) for place in places], {key: set(axes) for key, axes in divided.items()}
        )
        if not math.isclose(got, right, rel_tol=1e-5):
            raise _wrong_norm(got, right, ranks, places, divided, name)
    return "divided twice, copied, tied, on one stage only, and an empty piece"


def _gradients() -> list[tuple[str, list[dict[str, Any]], list[dict[str, int]], dict[str, set[str]], float]]:
    """(case, what ranks hold, where they are, along what it is divided, the norm); each adds a difficulty."""
    import torch

    generator = torch.Generator().manual_seed(28)
    matrix, norm, table, last = (
        scale * torch.randn(size, generator=generator) for scale, size in ((1, 10), (2, 6), (1.5, 12), (3, 4))
    )
    places = [{"tensor": t, "data": d, "pipeline": p} for p in range(2) for d in range(2) for t in range(2)]

    def part(vector: Any, place: Mapping[str, int], data: int) -> Any:
        """This rank's half of a half: all of it on the first data rank, nothing on the second, or halves."""
        half = vector.chunk(2)[place["tensor"]]
        cut = len(half) if data else len(half) // 2
        return half[:cut] if place["data"] == 0 else half[cut:]

    whole: list[dict[str, Any]] = [{} for _ in places]
    cases = []
    squares = 0.0
    divided: dict[str, set[str]] = {}

    def add(case: str, name: str, vector: Any, axes: set[str], pieces: Any) -> None:
        nonlocal squares
        squares += float(vector.double().square().sum())
        divided[name] = axes
        for held, place in zip(whole, places, strict=True):
            if (piece := pieces(place)) is not None:
                held[name] = piece
        cases.append((case, [dict(h) for h in whole], places, dict(divided), squares**0.5))

    both = {"tensor", "data"}
    add("divided", "matrix", matrix, both, lambda at: part(matrix, at, 1) if at["pipeline"] == 0 else None)
    add("copied", "norm", norm, set(), lambda at: norm if at["pipeline"] == 0 else None)
    add("tied", "table", table, both, lambda at: part(table, at, 0))
    add(
        "last stage", "last", last, {"data"}, lambda at: last.chunk(2)[at["data"]] if at["pipeline"] else None
    )
    return cases


def _wrong_norm(got: float, right: float, ranks: Any, places: Any, divided: Any, case: str) -> NotYet:
    what = f"got {got:.4g}, not {right:.4g}"
    if math.isnan(got):
        return NotYet(what, "an empty piece has no mean and no maximum", "its sum of squares is 0")
    pieces = [
        (place, name, float(piece.double().square().sum()))
        for held, place in zip(ranks, places, strict=True)
        for name, piece in held.items()
    ]

    def near(squares: float) -> bool:
        return math.isclose(got, squares**0.5, rel_tol=1e-4)

    def copies(place: Any, name: str, *besides: str) -> bool:
        """Whether this is the rank with coordinate 0 along all axes that do not divide the name."""
        return all(at == 0 for axis, at in place.items() if axis not in divided[name] and axis not in besides)

    if near(sum(s for _, _, s in pieces)):
        return NotYet(
            what,
            "every copy counts here",
            "ranks that differ only along axes outside divided[name] hold the same piece: count one of them",
        )
    if near(sum(s for place, name, s in pieces if copies(place, name))) and case == "last stage":
        return NotYet(
            what,
            "what only the last stage holds is missing",
            "count the first rank that holds a piece, not the one with coordinate 0",
        )
    if case in ("tied", "last stage") and near(
        sum(s for place, name, s in pieces if copies(place, name, "pipeline"))
    ):
        return NotYet(what, "a table on two stages is one parameter", "its pieces are copies along pipeline")
    added = sum(s**0.5 for place, name, s in pieces if copies(place, name) or name == "last")
    if math.isclose(got, right**2, rel_tol=1e-4) or math.isclose(got, added, rel_tol=1e-4):
        return NotYet(what, "norms do not add up", "squares do: take the root once, at the end")
    if near(
        sum(s for place, name, s in pieces if place["tensor"] == place["data"] == place["pipeline"] == 0)
    ):
        return NotYet(what, "the pieces of the other ranks are missing", "add up over all ranks")
    return NotYet(
        what,
        "add up the squares of all elements, each once, then take the root",
        "remember which (name, coordinates along divided[name]) you have counted",
    )


#: parameters in billions, layers, chips, chips of a host, GB of a chip for states
RUNS = (
    (1.0, 24, 64, 8, 40),  # one chip will do
    (7.5, 36, 128, 8, 40),  # tensor 4
    (13.0, 40, 64, 8, 30),  # all of a host
    (175.0, 96, 1024, 8, 50),  # and 8 stages
    (100.0, 60, 512, 8, 72),  # 3 stages would fit, but do not divide 512 chips
    (175.0, 90, 1536, 16, 40),  # larger hosts, and 5 stages do not divide the chips
    (100.0, 60, 960, 8, 26),  # 8 stages would fit, but do not divide 60 layers
    (1000.0, 4, 128, 8, 40),  # nothing
)


@exercise("2.8.3", "choose the degrees")
def degrees(answer: Answer) -> str:
    for billions, layers, chips, per_host, gigabytes in RUNS:
        right = _degrees(billions * 1e9, layers, chips, per_host, gigabytes * 1e9)
        got = answer.call_unchecked(billions * 1e9, layers, chips, per_host, gigabytes * 1e9)
        if (None if got is None else tuple(got)) != right:
            what = (
                f"got {got} for {billions:g} billion parameters, {layers} layers, {chips} chips in hosts of "
                f"{per_host}, {gigabytes} GB each"
            )
            raise _wrong_degrees(what, got, right, billions, layers, chips, per_host, gigabytes)
    return f"{len(RUNS)} runs, one of which fits nowhere"


def _degrees(
    parameters: float, layers: int, chips: int, per_host: int, room: float
) -> tuple[int, ...] | None:
    tensors = [(2**i, 1) for i in range(per_host.bit_length())]
    stages = [(per_host, p) for p in range(2, layers + 1) if layers % p == 0]
    for tensor, pipeline in tensors + stages:
        if chips % (tensor * pipeline) == 0 and 16 * parameters <= room * tensor * pipeline:
            return tensor, pipeline, chips // (tensor * pipeline)
    return None


def _wrong_degrees(
    what: str,
    got: Any,
    right: tuple[int, ...] | None,
    billions: float,
    layers: int,
    chips: int,
    per_host: int,
    gigabytes: float,
) -> NotYet:
    if got is None:
        return NotYet(what, "something fits", f"tensor x pipeline = {math.prod((right or (1,))[:2])} does")
    if not isinstance(got, Sequence) or len(got) != 3:
        return NotYet(what, "return three numbers, or None", "(tensor, pipeline, data)")
    tensor, pipeline, data = got
    if tensor > per_host:
        return NotYet(what, f"tensor={tensor} leaves the host", "go on with pipeline when tensor is per_host")
    if pipeline > 1 and tensor < per_host:
        return NotYet(what, "tensor goes first, up to the host", "pipeline stays 1 until tensor is per_host")
    if 16 * billions > gigabytes * tensor * pipeline * (1 + 1e-9):
        each = 16 * billions / tensor / pipeline
        return NotYet(what, f"{each:.0f} GB of states on a chip are too many", "divide by tensor x pipeline")
    if layers % pipeline:
        return NotYet(what, f"{pipeline} stages do not divide {layers} layers", "go through the divisors")
    if tensor * pipeline * data != chips:
        return NotYet(
            what,
            f"the degrees do not multiply to {chips} chips",
            "skip a tensor x pipeline that does not divide the chips; data is the rest",
        )
    return NotYet(what, "less model parallelism fits too", "take the first that fits: data scales best")
