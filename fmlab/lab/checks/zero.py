"""Checkers of notebook 2.3."""

import math
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("2.3.1", "who owns what?", returns=list)
def owners(answer: Answer) -> str:
    for offset, numel, length, ranks in ((3, 20, 7, 4), (0, 5, 10, 3), (12, 4, 5, 4), (6, 0, 4, 3)):
        right = [_bounds(offset, numel, length, rank) for rank in range(ranks)]
        got = [tuple(bounds) for bounds in answer(offset, numel, length, ranks)]
        what = f"got {got} for offset={offset}, numel={numel}, length={length}, {ranks} ranks"
        if len(got) != ranks:
            raise NotYet(what, "one range for each rank", "also for those that own nothing of it")
        for rank, ((first, end), bounds) in enumerate(zip(got, right, strict=True)):
            if (first, end) == bounds or (first == end and bounds[0] == bounds[1] and 0 <= end <= numel):
                continue
            raise _wrong_range(what, rank, (first, end), bounds, (offset, numel, length, ranks))
    return "cut in the middle, in one slice, behind the first ranks, and empty"


def _bounds(offset: int, numel: int, length: int, rank: int) -> tuple[int, int]:
    first = min(max(rank * length - offset, 0), numel)
    return first, min(max((rank + 1) * length - offset, 0), numel)


def _wrong_range(
    what: str, rank: int, got: tuple[int, int], right: tuple[int, int], given: tuple[int, int, int, int]
) -> NotYet:
    offset, numel, _, ranks = given
    first, end = got
    each = -(-numel // ranks)
    what = f"{what}: rank {rank} has {got}, not {right}"
    if got == (min(rank * each, numel), min((rank + 1) * each, numel)):
        return NotYet(what, "the vector is cut, not each parameter", "where does rank r's slice begin in it?")
    if offset and (first - offset, end - offset) == right:
        return NotYet(
            what,
            "that counts from the beginning of the vector",
            "element 0 of the parameter lies at `offset`: subtract it",
        )
    if end < first:
        return NotYet(
            what, "a range that ends before it begins", "bring both numbers into 0..numel, each on its own"
        )
    if end > numel or first > numel:
        return NotYet(what, "not past the end of the parameter", "no number may be more than numel")
    return NotYet(
        what, "draw the vector, and the slices under it", "slice r covers r·length … (r+1)·length - 1"
    )


@exercise("2.3.2", "one norm for all ranks", returns=float)
def global_norm(answer: Answer) -> str:
    for case, (ranks, copied, tied, right) in enumerate(_gradients()):
        given = [{name: piece.clone() for name, piece in pieces.items()} for pieces in ranks]
        got = answer(given, set(copied), list(tied))
        if math.isclose(got, right, rel_tol=1e-5):
            continue
        raise _wrong_norm(got, right, ranks, copied, tied, case)
    return "divided, copied, tied, and an empty slice"


def _gradients() -> list[tuple[Any, set[str], list[tuple[str, str]], float]]:
    """(what the ranks hold, copied names, ties, the norm): only divided ones, then copies, then ties too."""
    import torch

    torch.manual_seed(23)
    matrix, norm, table = torch.randn(12), 2 * torch.randn(5), 3 * torch.randn(9)
    empty = torch.zeros(0)
    cut = [{"matrix": matrix[:7]}, {"matrix": matrix[7:]}, {"matrix": empty}]
    with_copies = [{**pieces, "norm": norm} for pieces in cut]
    parts = (empty, table[:4], table[4:])
    with_ties = [
        {**pieces, "embedding": part, "head": part} for pieces, part in zip(with_copies, parts, strict=True)
    ]
    squares = [float(vector.double().square().sum()) for vector in (matrix, norm, table)]
    return [
        (cut, set(), [], squares[0] ** 0.5),
        (with_copies, {"norm"}, [], sum(squares[:2]) ** 0.5),
        (with_ties, {"norm"}, [("embedding", "head")], sum(squares) ** 0.5),
    ]


def _wrong_norm(got: float, right: float, ranks: Any, copied: Any, tied: Any, case: int) -> NotYet:
    what = f"got {got:.4g}, not {right:.4g}"
    if math.isnan(got):
        return NotYet(what, "an empty slice has no mean and no maximum", "its sum of squares is 0")
    second = {name for _, name in tied}
    pieces = [
        (rank, name, float(piece.double().square().sum()))
        for rank, held in enumerate(ranks)
        for name, piece in held.items()
    ]

    def near(squares: float) -> bool:
        return math.isclose(got, squares**0.5, rel_tol=1e-4)

    every_copy = sum(s for _, name, s in pieces if name not in second)
    both_names = sum(s for rank, name, s in pieces if rank == 0 or name not in copied)
    own = sum(s for rank, name, s in pieces if rank == 0 and name not in second)
    added = sum(
        s**0.5 for rank, name, s in pieces if name not in second and (rank == 0 or name not in copied)
    )
    if near(own):
        return NotYet(
            what, "the slices of the other ranks are missing", "the squares are added up over all ranks"
        )
    if math.isclose(got, added, rel_tol=1e-4):
        return NotYet(what, "norms do not add up", "squares do: take the root once, at the end")
    if case == 1 and near(every_copy):
        return NotYet(what, "a copy counts on one rank only", "leave out `copied` names on ranks above 0")
    if case == 2 and near(both_names):
        return NotYet(
            what, "two names, one parameter: it counts once", "leave out the second name of each tie"
        )
    return NotYet(
        what,
        "add up the squares of all elements, each once, then take the root",
        "which pieces are there more than once?",
    )


@exercise("2.3.3", "which stage?")
def first_stage(answer: Answer) -> str:
    billion = 1e9
    for parameters, ranks, room, k in (
        (1 * billion, 8, 20e9, 12),  # 0
        (7.5 * billion, 64, 80e9, 12),  # 1
        (7.5 * billion, 64, 20e9, 12),  # 2
        (7.5 * billion, 64, 16e9, 12),  # 3
        (7.5 * billion, 4, 16e9, 12),  # none
        (7.5 * billion, 8, 36e9, 4),  # 1, with an optimizer of 4 bytes
    ):
        right = _first_stage(parameters, ranks, room, k)
        got = answer.call_unchecked(parameters, ranks, room, k)
        if got == right and not isinstance(got, bool):
            continue
        what = (
            f"got {got} for {parameters / 1e9:g} billion parameters, {ranks} ranks, {room / 1e9:g} GB, k={k}"
        )
        if right is None:
            raise NotYet(what, "None, not a stage that does not fit", "check stage 3 like the others")
        if k != 12:
            raise NotYet(what, "K is an argument: not every optimizer is Adam", "use k instead of 12")
        if right == 0 and got == 3:
            raise NotYet(what, "that is the last stage that fits", "try stage 0 first: it sends the least")
        raise NotYet(
            what,
            "the optimizer's state is divided first",
            "stage 1: optimizer; stage 2: gradients too; stage 3: parameters too",
        )
    return "each stage once, and a model that does not fit"


def _first_stage(parameters: float, ranks: int, room: float, k: float) -> int | None:
    for stage in range(4):
        shares = [ranks if stage >= least else 1 for least in (3, 2, 1)]
        if sum(size * parameters / share for size, share in zip((2, 2, k), shares, strict=True)) <= room:
            return stage
    return None
