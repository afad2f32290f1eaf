"""How the programs of a generated Triton kernel share its space, and the bytes that they move."""

from dataclasses import dataclass
from math import ceil, prod

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.lower import Unsupported
from fmlab.compiler.codegen.triton_lower import Lowered
from fmlab.compiler.fusion.kernel import FusedKernel
from fmlab.kernels.triton.traffic import Traffic

ELEMENTS = 2048  # of a tile: 16 for each thread of 4 warps
WIDEST = 1024  # columns of an elementwise group's tile
MOST = 2**16  # elements that one program holds at once, of a row or of an image's group
MOST_ELEMENTS = 2**31 - 1  # offsets are 32-bit integers
PROGRAMS = 128  # of a kernel that adds up over rows: as many as a large GPU has multiprocessors, or so


@dataclass(frozen=True)
class Tiles:
    """Tiles of `tile` x `block` of the space [rows, columns], a grid of programs (down, across), and the
    numbers that the kernel gets, by name."""

    tile: int
    block: int
    grid: tuple[int, int]
    numbers: dict[str, int]

    @property
    def programs(self) -> int:
        return prod(self.grid)


def tiles(kernel: FusedKernel, lowered: Lowered) -> Tiles:
    """Raises Unsupported for rows, images, or a space that are too large for one kernel."""
    rows, columns = kernel.space
    wide = [*lowered.widths.values(), *(parts_of(kind) * columns for _, kind in lowered.writes)]
    if (elements := rows * max(columns, *wide)) > MOST_ELEMENTS:
        raise Unsupported(f"{elements:,} elements: offsets of 32 bits reach 2^31 - 1")
    numbers = {"ROWS": rows, "COLUMNS": columns, **lowered.widths}
    if lowered.pixels:
        numbers["PIXELS"] = lowered.pixels
    if lowered.groups:
        size = columns // lowered.groups
        tile, block = _power_of_2(lowered.pixels), _power_of_2(size)
        if tile * block > MOST:
            what = f"groups of {size} channels of {lowered.pixels:,} pixels"
            raise Unsupported(f"{what}: a program holds a whole one, in a tile of up to {MOST:,}")
        grid = (rows // lowered.pixels, lowered.groups)
        return Tiles(tile, block, grid, {**numbers, "SIZE": size})
    if lowered.whole and columns > MOST:
        raise Unsupported(f"rows of {columns:,} numbers: a program holds a whole row, of up to {MOST:,}")
    block = _power_of_2(columns) if lowered.whole else min(WIDEST, _power_of_2(columns))
    tile = max(1, min(_power_of_2(rows), ELEMENTS // block))
    down, across = ceil(rows / tile), ceil(columns / block)
    return Tiles(tile, block, (min(PROGRAMS, down) if lowered.walks else down, across), numbers)


def parts_of(kind: str) -> int:
    """How many full values lie side by side in what is written as this kind: 2 in "2 parts"."""
    return int(kind.split()[0]) if kind.endswith(" parts") else 1


def _power_of_2(size: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (size - 1).bit_length()


def traffic(kernel: FusedKernel, lowered: Lowered, shape: Tiles) -> Traffic:
    """Bytes that all programs load and store.

    What is as large as the space is moved once. A row is loaded by each program down (once for all its tiles
    where it walks over several), a column by each program across, and each program down stores its sum of
    rows.
    """
    (rows, columns), (down, across) = kernel.space, shape.grid
    moved = {
        "full": rows * columns,
        "part": rows * columns,
        "row": columns * down,
        "column": rows * across,
        "scalar": down * across,
        "sum": columns * down,
        "image": columns * down if lowered.groups else rows * columns,
        "group": down * across,
    }
    nodes = list(kernel.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    output = next(node for node in nodes if node.op == "output")
    size = [g.value(node).dtype.itemsize for node in (*given, *output.args[0])]
    loaded = sum(size[number] * moved[kind] for number, kind in lowered.reads)
    wide = 8 if lowered.dtype == "tl.float64" else 4
    partial = {number: wide for number, kind in lowered.writes if kind == "sum" and down > 1}
    moved |= {kind: parts_of(kind) * rows * columns for _, kind in lowered.writes if kind not in moved}
    stored = sum(partial.get(number, size[number]) * moved[kind] for number, kind in lowered.writes)
    return Traffic(loaded, stored + len(lowered.totals) * shape.programs * wide)
