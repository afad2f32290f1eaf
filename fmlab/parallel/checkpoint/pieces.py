"""Where a rank's piece of a tensor lies in the whole: as boxes, from the ledger alone.

A piece may be rows of a row-block of three stacked matrices, or a stretch of a parameter laid out as one row
of numbers. Whatever cut it, the same cut applied to the *numbers of the rows and columns* tells where each
element of the piece belongs. No strategy has to describe itself to the checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from fmlab.parallel.ledger import Ledger


@dataclass(frozen=True)
class Box:
    """A block of the whole: where it begins and how large it is, and where it lies in the piece.

    inside: a slice for each dim of the piece; or, where the piece is one row of numbers, one slice of that.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    inside: tuple[slice, ...]

    def of(self, piece: Tensor) -> Tensor:
        """The block, a view into `piece`."""
        part = piece[self.inside] if piece.dim() == len(self.inside) else piece.view(-1)[self.inside]
        return part.view(self.sizes) if part.shape != self.sizes else part

    def of_whole(self, whole: Tensor) -> Tensor:
        """The block, a view into the whole tensor."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))]


def whole_box(shape: tuple[int, ...]) -> list[Box]:
    """All of a tensor, as one box."""
    return [Box((0,) * len(shape), tuple(shape), tuple(slice(0, n) for n in shape))]


# region boxes
def boxes(ledger: Ledger, name: str) -> list[Box]:
    """The boxes of this rank's piece of a parameter; none if it holds no element. Padding is in none."""
    shape = ledger.entries[name].shape
    if not shape:  # a number by itself: one rank may hold it as a row of one
        empty = not local(ledger.piece(name, torch.zeros(()))).numel()
        return [] if empty else [Box((), (), (slice(0, 1),))]
    if type(ledger) is Ledger and not ledger.entries[name].cuts:
        return whole_box(shape)
    numbers = [local(ledger.piece(name, _numbers(shape, dim))) for dim in range(len(shape))]
    if numbers[0].dim() == len(shape):
        along = [_varying(piece, dim) for dim, piece in enumerate(numbers)]
        if all(line is not None for line in along):
            runs = [list(_runs(line)) for line in along if line is not None]
            return [
                Box(
                    tuple(start for _, start, _ in box),
                    tuple(length for *_, length in box),
                    tuple(slice(place, place + length) for place, _, length in box),
                )
                for box in product(*runs)
            ]
    return list(_stretches(numbers, shape))


def _numbers(shape: tuple[int, ...], dim: int) -> Tensor:
    """A tensor of that shape whose elements say their place along `dim`, from 1; padding will be 0.

    It is one line seen many times, so it takes the memory of a line.
    """
    view = [1] * len(shape)
    view[dim] = shape[dim]
    return torch.arange(1, shape[dim] + 1, dtype=torch.int32).view(view).expand(shape)


# endregion


def _varying(numbers: Tensor, dim: int) -> Tensor | None:
    """The one line along `dim` that `numbers` repeats in all other dims; None if it is not so."""
    if not numbers.numel():
        return torch.zeros(0, dtype=numbers.dtype)
    line = numbers[tuple(slice(None) if d == dim else 0 for d in range(numbers.dim()))]
    view = [1] * numbers.dim()
    view[dim] = -1
    padding = numbers == 0  # padded along another dim, perhaps
    return line if bool(((numbers == line.view(view)) | padding).all()) else None


def _runs(line: Tensor) -> Iterator[tuple[int, int, int]]:
    """(place in the piece, place in the whole, length) of each stretch of consecutive numbers."""
    if not len(line):
        return
    breaks = (line.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
        first = int(line[start])
        if first:
            yield start, first - 1, end - start
        # zeros differ by 0 from each other, so that padding is runs of one, and left out


def _stretches(numbers: list[Tensor], shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of a piece that is one row of numbers: parts of rows, then whole rows, then a part again."""
    flat = torch.zeros(numbers[0].numel(), dtype=torch.int64)
    for dim, places in enumerate(numbers):
        flat += (places.reshape(-1).long() - 1) * prod(shape[dim + 1 :])
    flat = torch.where(numbers[0].reshape(-1) == 0, -1, flat) + 1
    for place, start, length in _runs(flat):
        yield from _blocks(start, start + length, shape, (), place)


def _blocks(
    start: int, end: int, shape: tuple[int, ...], outer: tuple[int, ...], place: int
) -> Iterator[Box]:
    """Elements start..end of a tensor of `shape`, row after row, as the fewest blocks."""
    if start == end:
        return
    inner = prod(shape[1:])
    ones = (1,) * len(outer)
    if start % inner == 0 and end % inner == 0:
        yield Box(
            (*outer, start // inner, *(0,) * (len(shape) - 1)),
            (*ones, (end - start) // inner, *shape[1:]),
            (slice(place, place + end - start),),
        )
        return
    first, last = start // inner, (end - 1) // inner
    if first == last:
        yield from _blocks(start % inner, end - first * inner, shape[1:], (*outer, first), place)
        return
    head = -start % inner  # up to the next whole row
    tail = end % inner
    yield from _blocks(start, start + head, shape, outer, place)
    yield from _blocks(start + head, end - tail, shape, outer, place + head)
    yield from _blocks(end - tail, end, shape, outer, place + end - tail - start)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor (torch's DTensors are more than that)."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@dataclass(frozen=True)
class Piece:
    """A rank's part of a named tensor, with its place in the whole.

    writes: whether this rank is the one that saves it, where several hold the same.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    boxes: list[Box]
    writes: bool = True

    def at(self, offsets: tuple[int, ...]) -> Tensor:
        """The block of the piece that begins there in the whole; a view."""
        return next(box for box in self.boxes if box.offsets == offsets).of(self.tensor)
