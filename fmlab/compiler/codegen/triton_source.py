"""The file of a generated Triton kernel: its text, and loading it.

Groups that compute the same share a file: names come from the operators, and sizes are arguments.
"""

import hashlib
import importlib.util
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fmlab.compiler.codegen.triton_lower import Lowered
from fmlab.compiler.codegen.triton_maths import functions_in
from fmlab.compiler.codegen.triton_tiles import Tiles, parts_of
from fmlab.compiler.fusion.kernel import FusedKernel

WIDTH = 100  # of a line, where it can be chosen
_LEGEND = {
    "full": "[rows, columns]",
    "part": "[rows, columns of more]",
    "row": "[columns]",
    "column": "[rows]",
    "scalar": "[]",
    "sum": "[columns]",
    "image": "[images, columns]",
    "group": "[images, groups]",
}


def source(kernel: FusedKernel, lowered: Lowered, shape: Tiles) -> tuple[str, str]:
    """The kernel's name and the whole text of its file."""
    name = "_".join(member.strip("_") for member in kernel.members)[:60].strip("_") + "_kernel"
    reads = [f"in{number}" for number, _ in lowered.reads]
    first = len([node for node in kernel.graph.nodes if node.op == "placeholder"])
    writes = [f"out{number - first}" for number, _ in lowered.writes]
    pointers = ", ".join(f"{one}_ptr" for one in (*reads, *writes, *lowered.totals)) + ","
    pointers = textwrap.fill(pointers, WIDTH, initial_indent="    ", subsequent_indent="    ")
    sizes = f"    {', '.join(shape.numbers)}, TILE: tl.constexpr, BLOCK: tl.constexpr,"
    body = textwrap.indent("\n".join(_body(lowered)), "    ")
    text = "\n".join(["@kernel", f"def {name}(", pointers, sizes, "):", body])
    given = _shapes(reads, (kind for _, kind in lowered.reads))
    made = _shapes(writes, (kind for _, kind in lowered.writes))
    made = ", ".join(filter(None, [made, *(f"{one} [programs]" for one in lowered.totals)]))
    members = ", ".join(kernel.members)
    about = [
        textwrap.fill(f'"""One kernel for {len(kernel.members)} operators: {members}.', WIDTH),
        "",
        textwrap.fill(f"{given} -> {made}; {lowered.dtype.removeprefix('tl.')}.", WIDTH),
        "Written by fmlab.compiler.GenerateTriton.",
        '"""',
    ]
    functions = functions_in(text)
    imports = ["import triton"] * bool(functions) + ["import triton.language as tl", ""]
    imports += ["from fmlab.kernels.triton import kernel"]
    return name, "\n\n\n".join(["\n".join([*about, "", *imports]), *functions, text]) + "\n"


def _shapes(names: Iterable[str], kinds: Iterable[str]) -> str:
    legends = [_LEGEND.get(kind, f"[rows, {parts_of(kind)} * columns]") for kind in kinds]
    return ", ".join(f"{name} {legend}" for name, legend in zip(names, legends, strict=True))


def _body(lowered: Lowered) -> list[str]:
    """The lines of the kernel: which rows and columns are this program's, and what happens to them."""
    row = "row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]"
    whole = "at = tl.arange(0, BLOCK)[None, :]  # a whole row"
    masks = ["down = row < ROWS", "across = at < COLUMNS", "inside = down & across"]
    if lowered.groups:
        return [*_IMAGE, *lowered.loads, *lowered.body, *_stored_sums(lowered, "image")]
    if lowered.walks:
        return _walk(lowered, whole, masks)
    if lowered.whole:
        return [row, whole, *masks, *lowered.loads, *lowered.body]
    at = "at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]"
    return [row, at, *masks, *lowered.loads, *lowered.body]


_IMAGE = [
    "image, group = tl.program_id(0), tl.program_id(1)",
    "pixel, channel = tl.arange(0, TILE)[:, None], tl.arange(0, BLOCK)[None, :]",
    "row, at = image * PIXELS + pixel, group * SIZE + channel",
    "down, across = pixel < PIXELS, channel < SIZE",
    "inside = down & across",
]


def _walk(lowered: Lowered, at: str, masks: list[str]) -> list[str]:
    """A loop over tiles, with the sums stored behind it."""
    down, across, inside = masks
    sums = [f"{one} = tl.zeros((1, BLOCK), dtype={lowered.dtype})" for one in lowered.sums]
    sums += [f"{one} = tl.zeros((1, 1), dtype={lowered.dtype})" for one in lowered.totals]
    loop = [
        "for start in range(program * TILE, ROWS, tl.num_programs(0) * TILE):",
        *("    row = start + tl.arange(0, TILE)[:, None]", f"    {down}", f"    {inside}"),
        *(f"    {line}" for line in lowered.body),
    ]
    ends = _stored_sums(lowered, "program")
    ends += [f"tl.store({one}_ptr + program, tl.sum({one}))" for one in lowered.totals]  # of one number
    return ["program = tl.program_id(0)", at, across, *sums, *lowered.loads, *loop, *ends]


def _stored_sums(lowered: Lowered, whose: str) -> list[str]:
    return [
        f"tl.store({one.removesuffix('_sum')}_ptr + {whose} * COLUMNS + at, {one}, mask=across)"
        for one in lowered.sums
    ]


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
