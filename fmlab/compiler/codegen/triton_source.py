"""The file of a generated Triton kernel: its text, its tiles, the bytes that it moves, and loading it.

Groups that compute the same share a file: names come from the operators, and sizes are arguments.
"""

import hashlib
import importlib.util
import os
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.triton_lower import Lowered, Unsupported
from fmlab.compiler.codegen.triton_maths import functions_in
from fmlab.compiler.fusion.kernel import FusedKernel
from fmlab.kernels.triton.traffic import Traffic

ELEMENTS = 2048  # of a tile: 16 for each thread of 4 warps
WIDEST = 1024  # columns of an elementwise group's tile
MOST_COLUMNS = 2**16  # a row that one program holds at once
MOST_ELEMENTS = 2**31 - 1  # offsets are 32-bit integers
PROGRAMS = 128  # of a group that adds up over rows: as many as a large GPU has multiprocessors, or so

_LEGEND = {
    "full": "[rows, columns]",
    "row": "[columns]",
    "column": "[rows]",
    "scalar": "[]",
    "sum": "[columns]",
}


@dataclass(frozen=True)
class Tiles:
    """How a kernel's programs share the space [rows, columns]: tiles of `tile` x `block`, and the grid."""

    rows: int
    columns: int
    tile: int
    block: int
    grid: tuple[int, ...]

    @property
    def programs(self) -> int:
        return prod(self.grid)


def tiles(kernel: FusedKernel, lowered: Lowered) -> Tiles:
    """Raises Unsupported for rows, or a space, that are too large for one kernel."""
    rows, columns = kernel.space
    if rows * columns > MOST_ELEMENTS:
        raise Unsupported(f"{rows * columns:,} elements: offsets of 32 bits reach 2^31 - 1")
    if lowered.whole and columns > MOST_COLUMNS:
        raise Unsupported(
            f"rows of {columns:,} numbers: a program holds a whole row, of up to {MOST_COLUMNS:,}"
        )
    block = _power_of_2(columns) if lowered.whole else min(WIDEST, _power_of_2(columns))
    tile = max(1, min(_power_of_2(rows), ELEMENTS // block))
    down, across = ceil(rows / tile), ceil(columns / block)
    if lowered.sums:
        return Tiles(rows, columns, tile, block, (min(PROGRAMS, down),))
    return Tiles(rows, columns, tile, block, (down, across))


def _power_of_2(size: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (size - 1).bit_length()


def traffic(kernel: FusedKernel, lowered: Lowered, shape: Tiles) -> Traffic:
    """Bytes that all programs load and store.

    What is as large as the space is moved once. A row is loaded by each program (once for all its tiles where
    it walks over several), a column by each program beside it, and each program stores its sum over rows.
    """
    nodes = list(kernel.graph.nodes)
    output = next(node for node in nodes if node.op == "output")
    values = [g.value(node) for node in (*(n for n in nodes if n.op == "placeholder"), *output.args[0])]
    down = shape.grid[0]
    across = shape.grid[1] if len(shape.grid) > 1 else 1
    times = {"full": 1, "row": down, "column": across, "scalar": down * across, "sum": down}
    loaded = sum(_bytes(values[number]) * times[kind] for number, kind in lowered.reads)
    stored = sum(_bytes(values[number]) * times[kind] for number, kind in lowered.writes)
    return Traffic(loaded, stored)


def _bytes(x: Any) -> int:
    return int(x.numel() * x.dtype.itemsize)


def source(kernel: FusedKernel, lowered: Lowered) -> tuple[str, str]:
    """The kernel's name and the whole text of its file."""
    name = "_".join(member.strip("_") for member in kernel.members)[:60].strip("_") + "_kernel"
    reads = [f"in{number}" for number, _ in lowered.reads]
    first = len([node for node in kernel.graph.nodes if node.op == "placeholder"])
    writes = [f"out{number - first}" for number, _ in lowered.writes]
    parameters = [f"{one}_ptr" for one in (*reads, *writes)]
    sizes = "ROWS, COLUMNS, TILE: tl.constexpr, BLOCK: tl.constexpr,"
    pointers = textwrap.fill(
        ", ".join(parameters) + ",", 100, initial_indent="    ", subsequent_indent="    "
    )
    head = f"def {name}(\n{pointers}\n    {sizes}\n):"
    body = [*_places(lowered), *lowered.loads, *_walk(lowered)]
    text = "\n".join(["@kernel", head, *(f"    {line}" for line in body)])
    given = ", ".join(f"{one} {_LEGEND[kind]}" for one, (_, kind) in zip(reads, lowered.reads, strict=True))
    made = ", ".join(f"{one} {_LEGEND[kind]}" for one, (_, kind) in zip(writes, lowered.writes, strict=True))
    about = [
        textwrap.fill(
            f'"""One kernel for {len(kernel.members)} operators: {", ".join(kernel.members)}.', 100
        ),
        "",
        textwrap.fill(f"{given} -> {made}; {lowered.dtype.removeprefix('tl.')}.", 100),
        "Written by fmlab.compiler.GenerateTriton.",
        '"""',
    ]
    functions = functions_in(text)
    used = ["import triton"] * bool(functions)
    imports = "\n".join(
        [*used, "import triton.language as tl", "", "from fmlab.kernels.triton import kernel"]
    )
    return name, "\n\n\n".join(["\n".join(about) + "\n\n" + imports, *functions, text]) + "\n"


def _places(lowered: Lowered) -> list[str]:
    """The lines that say which rows and columns are this program's, where they are the same throughout."""
    if not lowered.whole:
        across = "tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]"
        return [*_rows("tl.program_id(0) * TILE"), f"at = {across}", "inside = (row < ROWS) & (at < COLUMNS)"]
    at = "at = tl.arange(0, BLOCK)[None, :]  # a whole row"
    if lowered.sums:
        zero = f"tl.zeros((1, BLOCK), dtype={lowered.dtype})"
        return ["program = tl.program_id(0)", at, *(f"{one} = {zero}" for one in lowered.sums)]
    return [*_rows("tl.program_id(0) * TILE"), at, "inside = (row < ROWS) & (at < COLUMNS)"]


def _rows(first: str) -> list[str]:
    return [f"row = {first} + tl.arange(0, TILE)[:, None]"]


def _walk(lowered: Lowered) -> list[str]:
    """The body; in a loop over tiles, with the sums stored behind it, where there are sums over rows."""
    if not lowered.sums:
        return lowered.body
    loop = "for start in range(program * TILE, ROWS, tl.num_programs(0) * TILE):"
    body = [*_rows("start"), "inside = (row < ROWS) & (at < COLUMNS)", *lowered.body]
    ends = [
        f"tl.store({one.removesuffix('_sum')}_ptr + program * COLUMNS + at, {one}, mask=at < COLUMNS)"
        for one in lowered.sums
    ]
    return [loop, *(f"    {line}" for line in body), *ends]


_loaded: dict[Path, Any] = {}


def load(name: str, text: str, folder: Path) -> tuple[Path, Any]:
    """Write `text` to a file of `folder`, unless it is there, and import it: the file, its function `name`.

    Raises OSError where the folder cannot be written.
    """
    file = folder / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not file.exists() or file.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as part:
            part.write(text)
        os.replace(part.name, file)  # whole or not at all, if two processes write at once
        _loaded.pop(file, None)
    if file not in _loaded:
        spec = importlib.util.spec_from_file_location(f"fmlab_generated_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where Triton looks for a function's text
        spec.loader.exec_module(module)
        _loaded[file] = getattr(module, name)
    return file, _loaded[file]
