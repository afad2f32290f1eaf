"""What vector, scalar and gpsimd engine have in common: checks, operators, functions."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from fmlab.kernels.tiles.core import FREE_PSUM, FREE_SBUF
from fmlab.kernels.tiles.errors import refuse
from fmlab.kernels.tiles.machine import Machine
from fmlab.kernels.tiles.tile import Tile, check_conversion

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Operators of two operands. All are computed in fp32, whatever the tiles hold; comparisons give 1 and 0.
OPERATORS: dict[str, Operator] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "equal": lambda a, b: (a == b).float(),
    "greater_equal": lambda a, b: (a >= b).float(),
    "less": lambda a, b: (a < b).float(),
}
#: Functions of the scalar engine.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": lambda x: x,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "square": torch.square,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x.sum(dim=1, keepdim=True),
    "max": lambda x: x.amax(dim=1, keepdim=True),
    "min": lambda x: x.amin(dim=1, keepdim=True),
}
Operand = float | Tile


class Elementwise(Machine):
    """Checks of what is streamed through an engine."""

    def _check_streams(self, engine: str, *tiles: Tile) -> None:
        """Each tile can be streamed through this engine."""
        for tile in tiles:
            self._check_alive(tile)
            most = FREE_SBUF if tile.space == "SBUF" else FREE_PSUM
            if tile.free_size > most:
                refuse(f"an instruction walks at most {most} elements a partition in {tile.space}: {tile}")
            if engine == "gpsimd" and tile.space == "PSUM":
                refuse(f"gpsimd cannot reach PSUM: copy {tile} to SBUF first")
            first, past = tile.region()[:2]
            step = 128 if past - first > 64 else 64 if past - first > 32 else 32
            if first % step:
                legal = ", ".join(str(n) for n in range(0, 128, step))
                refuse(f"{tile}: {past - first} partitions begin at partition {legal}, not at {first}")

    def _check_result(self, engine: str, out: Tile, *sources: torch.dtype) -> None:
        """The result can be streamed out, and no float of the sources (default: fp32) becomes an integer."""
        self._check_streams(engine, out)
        check_conversion(out.dtype, *(sources or (torch.float32,)))

    def _check_operand_of(self, data: Tile, operand: Operand) -> list[Tile]:
        """An operand is a number, or a tile with one element for each partition of the data."""
        if isinstance(operand, int | float):
            return []
        self._check_alive(operand)
        if operand.shape != (data.partitions, 1):
            refuse(
                f"an operand is a number or a tile of shape ({data.partitions}, 1), one element a partition, "
                f"not {operand}"
            )
        return [operand]

    @staticmethod
    def _value(operand: Operand, like: torch.Tensor) -> torch.Tensor:
        """The operand in fp32, ready to be broadcast over the data."""
        if isinstance(operand, Tile):
            return operand.data.float().reshape(-1, *[1] * (like.dim() - 1))
        return torch.full((), float(operand), device=like.device)

    @staticmethod
    def _same_shape(a: Tile, b: Tile) -> None:
        if a.shape != b.shape:
            refuse(f"both tiles need one shape; got {a} and {b}")


def known(op: str, table: dict[str, Callable[..., torch.Tensor]], what: str) -> Callable[..., torch.Tensor]:
    """The function of this name. KernelError with the known ones for another."""
    if op not in table:
        refuse(f"{what} {op!r} is unknown; choose from {', '.join(table)}")
    return table[op]


def ordered(op: Operator, a: torch.Tensor, b: torch.Tensor, reverse: bool) -> torch.Tensor:
    return op(b, a) if reverse else op(a, b)


def sixteen_bit(*tiles: Tile) -> bool:
    return all(tile.dtype.itemsize == 2 for tile in tiles)


def bf16(*tiles: Tile) -> bool:
    return all(tile.dtype == torch.bfloat16 for tile in tiles)


def in_psum(*tiles: Tile) -> bool:
    return any(tile.space == "PSUM" for tile in tiles)
