"""Which positions of a sequence lie on which rank, and how much work that makes: arithmetic, no process
needed.

A rank holds one or two runs of columns, as Python ranges:

    none       rank r has chunk r of n                                  0 0 0 0 1 1 1 1
    striped    rank r has every n-th column from r on                   0 1 0 1 0 1 0 1
               (Brandon et al. 2023, arXiv:2311.09431)
    mirrored   rank r has chunks r and 2n - 1 - r of 2n                 0 0 1 1 1 1 0 0
               (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2; also called zigzag)

Under a causal mask a column sees all before it, so that with "none" the last rank has almost twice the mean
work and the others wait for it; the other two even it out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fmlab.models.attention import AttentionMask

Columns = tuple[range, ...]


# region columns
def columns_of(rank: int, ranks: int, length: int, balance: str) -> Columns:
    """The columns that `rank` of `ranks` holds of a sequence, in the order in which it holds them.

    Raises ValueError for a length that cannot be divided (see `padded_length`) and an unknown balance.
    """
    if length != padded_length(length, ranks, balance):
        raise ValueError(
            f"{length} columns cannot be divided among {ranks} ranks with balance {balance!r}: give a "
            f"multiple of {chunks(ranks, balance)}"
        )
    size = length // chunks(ranks, balance)
    if balance == "striped":
        return (range(rank, length, ranks),)
    if balance == "none":
        return (range(rank * size, (rank + 1) * size),)
    mirror = 2 * ranks - 1 - rank
    return range(rank * size, (rank + 1) * size), range(mirror * size, (mirror + 1) * size)


# endregion


def chunks(ranks: int, balance: str) -> int:
    """Into how many equal pieces a sequence is cut. Raises ValueError for an unknown balance."""
    if balance not in ("none", "striped", "mirrored"):
        raise ValueError(f"balance={balance!r}: legal are none, striped, mirrored")
    return 2 * ranks if balance == "mirrored" else ranks


def padded_length(length: int, ranks: int, balance: str) -> int:
    """The next length that can be divided."""
    pieces = chunks(ranks, balance)
    return -(-length // pieces) * pieces


def indices(columns: Columns, device: torch.device | None = None) -> Tensor:
    """The columns as int64 [l]."""
    return torch.cat([torch.arange(c.start, c.stop, c.step, device=device) for c in columns])


# region tiles
@dataclass(frozen=True)
class Tile:
    """Queries `rows` against keys `columns`, as places in what two ranks hold.

    diagonal: the order of the columns lets query i of the tile see keys 0..i only, else all
    partial:  a window or a block pattern also hides some of it
    """

    rows: slice
    columns: slice
    diagonal: bool
    partial: bool = False

    @property
    def pairs(self) -> int:
        """How many pairs of query and key are allowed by the order of columns."""
        rows, columns = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return rows * (rows + 1) // 2 if self.diagonal else rows * columns


def tiles(mine: Columns, theirs: Columns, mask: AttentionMask) -> list[Tile]:
    """What queries in the columns `mine` have to compute with keys in the columns `theirs`.

    What causality or a window hides as a whole is left out; padding and documents are not looked at.
    Neighbours of which all is allowed are one tile: few large products are faster than many small ones.
    """
    found: list[Tile] = []
    row = 0
    for queries in mine:
        column = 0
        for keys in theirs:
            for tile in _tile(queries, keys, row, column, mask):
                while found and (joined := _joined(found[-1], tile)):
                    tile = joined
                    found.pop()
                found.append(tile)
            column += len(keys)
        row += len(queries)
    return found


def _joined(a: Tile, b: Tile) -> Tile | None:
    """Two neighbours as one tile, if they are a rectangle of which all is allowed."""
    if a.diagonal or b.diagonal or a.partial or b.partial:
        return None
    if a.rows == b.rows and a.columns.stop == b.columns.start:
        return Tile(a.rows, slice(a.columns.start, b.columns.stop), False)
    if a.columns == b.columns and a.rows.stop == b.rows.start:
        return Tile(slice(a.rows.start, b.rows.stop), a.columns, False)
    return None


def _tile(queries: range, keys: range, row: int, column: int, mask: AttentionMask) -> Iterator[Tile]:
    n = len(queries)
    assert n == len(keys)
    assert queries.step == keys.step
    if not n:
        return
    most, least = queries[-1] - keys.start, queries.start - keys[-1]  # distances from key to query
    partial = mask.blocks is not None
    if mask.window is not None:
        if least >= mask.window or -most >= mask.window:
            return
        partial = partial or max(most, 0 if mask.causal else -least) >= mask.window
    shift = (queries.start - keys.start) // keys.step  # query i sees keys 0..i + shift
    if not mask.causal or shift >= n - 1:
        yield Tile(slice(row, row + n), slice(column, column + n), False, partial)
    elif shift == 0:
        yield Tile(slice(row, row + n), slice(column, column + n), True, partial)
    elif shift == -1:  # two stripes, the keys' one place later: without the first query and the last key
        if n > 1:
            yield Tile(slice(row + 1, row + n), slice(column, column + n - 1), True, partial)
    else:
        assert shift <= -n, "runs of columns overlap in a way that no layout here makes"


# endregion


def work(length: int, ranks: int, balance: str, causal: bool = True, window: int | None = None) -> list[int]:
    """Allowed pairs of query and key that each rank computes for one row and head.

    Ranks wait for one another in every step of a ring, see `critical_work`.
    """
    return [sum(row) for row in work_by_step(length, ranks, balance, causal, window)]


def work_by_step(
    length: int, ranks: int, balance: str, causal: bool = True, window: int | None = None
) -> list[list[int]]:
    """[rank][step of the ring] -> allowed pairs. In step i rank r has the keys of rank r - i."""
    mask = AttentionMask(causal, length, length, window=window)
    held = [columns_of(rank, ranks, length, balance) for rank in range(ranks)]
    return [
        [_pairs(held[rank], held[(rank - step) % ranks], mask) for step in range(ranks)]
        for rank in range(ranks)
    ]


def _pairs(mine: Columns, theirs: Columns, mask: AttentionMask) -> int:
    if mask.window is None:
        return sum(tile.pairs for tile in tiles(mine, theirs, mask))
    distance = indices(mine)[:, None] - indices(theirs)
    allowed = distance.abs() < mask.window
    return int((allowed & (distance >= 0) if mask.causal else allowed).sum())


def critical_work(length: int, ranks: int, balance: str, causal: bool = True) -> int:
    """Pairs on the critical path of a ring whose ranks wait for one another after every step: the sum over
    the steps of the most that any rank has to do in it."""
    by_step = zip(*work_by_step(length, ranks, balance, causal), strict=True)
    return sum(max(step) for step in by_step)
