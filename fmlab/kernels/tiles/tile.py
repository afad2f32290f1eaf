"""What kernels handle: tiles in SBUF and PSUM, rings of them, and tensors in HBM.

The first dimension of a tile is the partition dimension (at most 128); the others are free dimensions. Slices
of a tile are views of the same place.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from fmlab.kernels.tiles.core import PARTITIONS
from fmlab.kernels.tiles.errors import here, refuse
from fmlab.kernels.tiles.memory import Block, History, Region

if TYPE_CHECKING:
    from fmlab.kernels.tiles.machine import Machine

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
Space = Literal["SBUF", "PSUM"]


def short(dtype: torch.dtype) -> str:
    """The usual short name of a dtype: bf16 for torch.bfloat16."""
    names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    return names.get(str(dtype), str(dtype).removeprefix("torch."))


def about(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"({'x'.join(map(str, shape))} {short(dtype)})"


@dataclass
class Lease:
    """The time that a tile owns its place: from allocation until it is freed, or until its ring comes
    round."""

    block: Block
    born: int  # number of the next instruction when the place was taken
    ended: str = ""  # why the place is no longer this tile's
    ring: bool = False  # the place is a ring's, which gives it to the next tile itself


class Tile:
    """A rectangle in SBUF or PSUM, or a view of one. Made by the core: sbuf, psum, load, a ring, results.

    shape, dtype, name: as they say. `tile[:, a:b]` and `tile[p:q]` are views; `tile.free()` gives the place
    back before Python does.
    """

    def __init__(
        self, space: Space, name: str, lease: Lease, data: torch.Tensor, mask: torch.Tensor, row: int
    ) -> None:
        self.space, self.name, self.lease = space, name, lease
        self.data, self.mask = data, mask  # values, and which of them were written
        self._row = row  # elements of one partition of the whole tile

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def partitions(self) -> int:
        return self.data.shape[0]

    @property
    def free_size(self) -> int:
        """Elements in each partition."""
        return self.data[0].numel()

    def region(self) -> Region:
        """The bytes that this view spans."""
        first, column = divmod(int(self.data.storage_offset()), self._row)
        extent = 1 + sum(
            (n - 1) * step for n, step in zip(self.shape[1:], self.data.stride()[1:], strict=True)
        )
        size, start = self.dtype.itemsize, self.lease.block.start
        return first, first + self.partitions, start + column * size, start + (column + extent) * size

    def __getitem__(self, index: Any) -> "Tile":
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            refuse(f"{self} has {len(self.shape)} dimensions, and {len(parts)} are indexed")
        if not isinstance(parts[0], slice):
            refuse(
                f"the partition dimension of {self} stays: write a slice such as [i:i+1], not {parts[0]!r}"
            )
        for part, size in zip(parts, self.shape, strict=False):
            if isinstance(part, slice):
                stop = size if part.stop is None else part.stop
                if part.step not in (None, 1) or not 0 <= (part.start or 0) < stop <= size:
                    refuse(f"slice {part.start}:{part.stop} does not lie in a dimension of {size} of {self}")
            elif not (isinstance(part, int) and 0 <= part < size):
                refuse(f"{part!r} is no index of a dimension of {size} of {self}; use slices and numbers")
        return Tile(self.space, self.name, self.lease, self.data[parts], self.mask[parts], self._row)

    def free(self) -> None:
        """Give the place back now. Any use of the tile or its views from here on is refused."""
        if self.lease.ended:
            refuse(f"{self} is already gone: {self.lease.ended}")
        if self.lease.ring:
            refuse(f"{self} stands in a ring, which hands its place on by itself")
        self.lease.ended = f"freed in {here()}"
        self.lease.block.release()

    def __str__(self) -> str:
        return f"{self.name} {about(self.shape, self.dtype)}"

    __repr__ = __str__


class Ring:
    """`depth` tiles of one shape that are used in turn: `next()` gives the place that was used longest ago.

    One buffer: a load has to wait until the last instruction has read the tile before. Two: it fills one
    while the other is worked on. Tiles whose place went to a later one are refused.
    """

    def __init__(self, core: "Machine", tiles: list[Tile]) -> None:
        self._core, self._tiles, self._count = core, tiles, 0

    def next(self) -> Tile:
        """The next place, as a tile that is still unwritten."""
        place = self._count % len(self._tiles)
        old = self._tiles[place]
        if self._count >= len(self._tiles):
            old.lease.ended = f"its place in a ring of {len(self._tiles)} went to the next tile in {here()}"
        self._count += 1
        fresh = self._core.tile_at(old.lease.block, old.space, old.name, old.shape, old.dtype)
        fresh.lease.ring = True
        self._tiles[place] = fresh
        return fresh


class Hbm:
    """A tensor in HBM, or a view of one: what kernels are called with and what they return.

    Index it like a torch tensor; `.T` swaps the last two dimensions (of the view: nothing moves, but a
    transfer then moves single elements). `role`: "input" is only read, "output" is made by the kernel.
    """

    def __init__(
        self,
        name: str,
        role: str,
        data: torch.Tensor,
        mask: torch.Tensor | None,
        history: History,
        columns: int,
        owner: "Machine",
    ) -> None:
        self.name, self.role, self.data, self.mask, self.history = name, role, data, mask, history
        self._columns, self.owner = columns, owner  # size of the whole tensor's last dimension

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def region(self) -> Region:
        """Rows and columns that this view spans, of the tensor as rows of its last dimension."""
        row, column = divmod(int(self.data.storage_offset()), self._columns)
        steps = [
            (n - 1, *divmod(step, self._columns))
            for n, step in zip(self.shape, self.data.stride(), strict=True)
        ]
        rows, columns = (sum(n * step[k] for n, *step in steps) for k in (0, 1))
        return row, row + rows + 1, column, column + columns + 1

    def __getitem__(self, index: Any) -> "Hbm":
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, int | slice) or part is None for part in parts):
            refuse(f"{self} is indexed by numbers, slices and None, which are views; got {index!r}")
        for part, size in zip((one for one in parts if one is not None), self.shape, strict=False):
            if isinstance(part, slice) and not 0 <= (part.start or 0) < (part.stop or size) <= size:
                refuse(f"slice {part.start}:{part.stop} does not lie in a dimension of {size} of {self}")
        try:
            data = self.data[index]
        except (IndexError, TypeError, ValueError) as error:
            refuse(f"{self} cannot be indexed so: {error}")
        mask = None if self.mask is None else self.mask[index]
        return Hbm(self.name, self.role, data, mask, self.history, self._columns, self.owner)

    @property
    def T(self) -> "Hbm":
        mask = None if self.mask is None else self.mask.mT
        return Hbm(self.name, self.role, self.data.mT, mask, self.history, self._columns, self.owner)

    def __str__(self) -> str:
        return f"{self.name} {about(self.shape, self.dtype)} in HBM"

    __repr__ = __str__


def side_by_side(data: torch.Tensor) -> int:
    """How many elements lie next to one another in memory, in the last dimensions of a view."""
    run = 1
    for size, step in zip(reversed(data.shape), reversed(data.stride()), strict=True):
        if size > 1 and step != run:
            break
        run *= size
    return run


def check_dtype(dtype: Any) -> None:
    """KernelError unless the machine has this dtype."""
    if dtype not in DTYPES:
        legal = ", ".join(map(short, DTYPES))
        refuse(f"dtype {dtype} is not supported; choose from {legal} (convert outside of the kernel)")


def check_conversion(kind: torch.dtype, *sources: torch.dtype) -> None:
    """KernelError where numbers would have to be rounded to integers, which is not imitated."""
    if kind == torch.int32 and any(source != torch.int32 for source in sources):
        refuse("the result would be int32, and rounding to integers is not imitated; give it a float dtype")


def check_shape(shape: tuple[int, ...], name: str) -> None:
    """KernelError unless this can be a tile."""
    if len(shape) < 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        refuse(f"{name}: a tile has a partition dimension and free dimensions, not {shape}")
    if shape[0] > PARTITIONS:
        refuse(
            f"{name}: {shape[0]} partitions, and there are {PARTITIONS}: the first dimension of a tile is "
            f"the partition dimension; take {PARTITIONS} rows at a time"
        )
