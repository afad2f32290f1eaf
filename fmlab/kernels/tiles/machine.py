"""The machine under the engines: it gives out memory, checks tiles, and writes the program down.

A kernel runs once, as plain Python. Each instruction computes its values at once (in program order, so the
numbers are right whatever the times are) and is noted with what it must wait for; when the kernel has ended,
fmlab.kernels.tiles.schedule says when each would have run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmlab.kernels.tiles.core import BANK_BYTES, BANKS, Core
from fmlab.kernels.tiles.errors import Line, here, refuse
from fmlab.kernels.tiles.memory import History, Memory
from fmlab.kernels.tiles.tile import Hbm, Lease, Ring, Space, Tile, about, check_dtype, check_shape

ENGINES = ("load", "store", "tensor", "vector", "scalar", "gpsimd")


@dataclass
class Instruction:
    """One instruction: what it is, what it costs, what it waits for, and (once scheduled) when it runs.

    waits_for: numbers of earlier instructions. cycles: that its engine is taken (compute). parts,
    part_seconds: DMA engines and the time of each (loads and stores). ports: what it shares with another
    engine (v2). start, end: seconds from the start of the kernel.
    """

    number: int
    engine: str
    name: str
    about: str
    line: Line
    waits_for: tuple[int, ...]
    cycles: float = 0.0
    parts: int = 0
    part_seconds: float = 0.0
    ports: frozenset[str] = frozenset()
    flops: int = 0
    nbytes: int = 0
    start: float = field(default=0.0, compare=False)
    end: float = field(default=0.0, compare=False)


@dataclass
class _Loop:
    """An affine_range that is running: the numbers of the next instructions when it and its turn began."""

    began: int
    turn: int


class Machine:
    """Memory and program of one core. `dry`: shapes alone, no values."""

    def __init__(self, core: Core, dry: bool = False) -> None:
        self.core, self.dry = core, dry
        self.program: list[Instruction] = []
        self._memories = {
            "SBUF": Memory("SBUF", core.sbuf_partition, 32),
            "PSUM": Memory("PSUM", BANKS * BANK_BYTES, BANK_BYTES),
        }
        self._loops: list[_Loop] = []
        self._device = "meta" if dry else "cpu"
        self.fp32_matmuls = False  # whether the peak rate is that of fp32

    def memory(self, space: Space) -> Memory:
        return self._memories[space]

    # ---- memory ----------------------------------------------------------------------------------------

    def sbuf(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, name: str = "") -> Tile:
        """A tile in SBUF: shape (partitions <= 128, free, ...). KernelError when SBUF is full."""
        return self._allocate("SBUF", tuple(shape), dtype, name)

    def psum(self, shape: Sequence[int], name: str = "") -> Tile:
        """A tile in PSUM, always fp32. It takes whole banks: 8 of 2 KiB (512 numbers) in each partition."""
        return self._allocate("PSUM", tuple(shape), torch.float32, name)

    def ring(
        self,
        depth: int,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        space: Space = "SBUF",
        name: str = "",
    ) -> Ring:
        """`depth` places of one shape, used in turn: 1 is a single buffer, 2 a double buffer."""
        if not (isinstance(depth, int) and depth > 0):
            refuse(f"a ring has 1 place or more, not {depth!r}")
        name = name or here().assigned
        names = [f"{name or 'ring'}[{i}]" for i in range(depth)]
        return Ring(self, [self._allocate(space, tuple(shape), dtype, one) for one in names])

    def hbm(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, name: str = "") -> Hbm:
        """A tensor in HBM that the kernel fills with `store`, to return it or to read it again."""
        check_dtype(dtype)
        shape = tuple(shape)
        if not shape or min(shape) < 1:
            refuse(f"a tensor in HBM has dimensions above 0, not {shape}")
        data = torch.empty(shape, dtype=dtype, device=self._device)
        mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return Hbm(name or here().assigned or "output", "output", data, mask, History(), shape[-1], self)

    def tile_at(
        self, block: Any, space: Space, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tile:
        """A fresh, unwritten tile on a place that is already ours."""
        data = torch.empty(shape, dtype=dtype, device=self._device)
        mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return Tile(space, name, Lease(block, len(self.program)), data, mask, math.prod(shape[1:]))

    def _allocate(self, space: Space, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tile:
        name = name or here().assigned or "a tile"
        check_dtype(dtype)
        check_shape(shape, name)
        if space == "PSUM" and dtype != torch.float32:
            refuse(f"{name}: PSUM holds fp32, where products are summed; copy to a tile in SBUF to convert")
        nbytes = math.prod(shape[1:]) * dtype.itemsize
        block = self.memory(space).allocate(nbytes, name, about(shape, dtype))
        return self.tile_at(block, space, name, shape, dtype)

    def _result(
        self,
        out: Tile | None,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        default: torch.dtype,
        space: Space = "SBUF",
    ) -> Tile:
        """`out`, which must have this shape (and dtype, if one is asked for), or a new tile."""
        if out is None:
            return self._allocate(space, shape, dtype or default, "")
        self._check_alive(out)
        if out.shape != shape:
            refuse(f"the result has shape {shape}, and {out} was given for it")
        if dtype not in (None, out.dtype):
            refuse(f"the result goes to {out}, which has its dtype; dtype= is for new tiles")
        return out

    # ---- loops -----------------------------------------------------------------------------------------

    def affine_range(self, count: int) -> Iterator[int]:
        """range(count), with the promise that no turn reads what an earlier turn wrote; it is checked.

        Sums of matmuls in PSUM are not counted as reading. What one turn hands to the next, such as a running
        maximum, needs `sequential_range`. Times do not depend on which of them you write.
        """
        self._check_count(count)
        loop = _Loop(len(self.program), len(self.program))
        self._loops.append(loop)
        try:
            for i in range(count):
                loop.turn = len(self.program)
                yield i
        finally:
            self._loops.remove(loop)

    def sequential_range(self, count: int) -> Iterator[int]:
        """range(count), where a turn may read what earlier turns wrote."""
        self._check_count(count)
        yield from range(count)

    @staticmethod
    def _check_count(count: int) -> None:
        if not isinstance(count, int):
            refuse(f"a loop has a whole number of turns, not {count!r}: divide with //")

    # ---- the program -----------------------------------------------------------------------------------

    def _issue(
        self,
        engine: str,
        name: str,
        reads: Sequence[Tile],
        writes: Sequence[Tile],
        cycles: float,
        flops: int = 0,
        adds_to: Tile | None = None,
    ) -> None:
        """Note an instruction of a compute engine, after its tiles have been checked.

        adds_to: the PSUM tile to which a matmul adds: it follows earlier matmuls of its own engine without
        waiting for their results.
        """
        waits: set[int] = set()
        for tile in reads:
            waits |= self._check_read(tile)
        for tile in writes:
            users = self._check_write(tile)
            if tile is adds_to:
                users = {number for number in users if self.program[number].engine != "tensor"}
            waits |= users
        number = len(self.program)
        self._note(number, engine, reads, writes)
        shape = "x".join(map(str, writes[0].shape))
        self.program.append(
            Instruction(
                number, engine, name, f"{writes[0].name} {shape}", here(), tuple(sorted(waits)),
                cycles=cycles, ports=self._ports(engine, [*reads, *writes]), flops=flops,
            )
        )  # fmt: skip

    def _ports(self, engine: str, tiles: Sequence[Tile]) -> frozenset[str]:
        """What this engine cannot use at the same time as another (v2)."""
        spaces = {tile.space for tile in tiles} if self.core.shared_ports else set()
        shared = {"SBUF": ("vector", "gpsimd"), "PSUM": ("vector", "scalar")}
        return frozenset(f"{space} port" for space in spaces if engine in shared[space])

    def _check_read(self, tile: Tile) -> set[int]:
        self._check_alive(tile)
        if not self.dry and not bool(tile.mask.all()):
            part = "was never written" if not bool(tile.mask.any()) else "was written only in part"
            refuse(f"{tile} is read, but it {part}: load or compute it first")
        writers = self.memory(tile.space).history.writers(tile.region())
        self._check_promise(tile, {number for number in writers if number >= tile.lease.born})
        return writers

    def _check_promise(self, what: Tile | Hbm, writers: set[int]) -> None:
        """Refuse to read what an earlier turn of a running affine_range wrote."""
        for loop in self._loops:
            if any(loop.began <= number < loop.turn for number in writers):
                refuse(
                    f"{what} was written in an earlier turn of an affine_range, which promises that its "
                    "turns do not depend on one another; use sequential_range"
                )

    def _check_write(self, tile: Tile) -> set[int]:
        self._check_alive(tile)
        return self.memory(tile.space).history.users(tile.region())

    def _check_alive(self, tile: Tile) -> None:
        if not isinstance(tile, Tile):
            what = (
                f"{tile} is in HBM, which only load and store reach" if isinstance(tile, Hbm) else repr(tile)
            )
            refuse(f"a tile in SBUF or PSUM is needed here: {what}")
        if tile.lease.block.memory is not self.memory(tile.space):
            refuse(f"{tile} belongs to another run")
        if tile.lease.ended:
            refuse(f"{tile} is used after it is gone: {tile.lease.ended}")

    def _note(self, number: int, engine: str, reads: Sequence[Tile], writes: Sequence[Tile]) -> None:
        for tile in reads:
            self.memory(tile.space).history.note_read(tile.region(), number, engine)
        for tile in writes:
            self.memory(tile.space).history.note_write(tile.region(), number)
            if not self.dry:
                tile.mask.fill_(True)
