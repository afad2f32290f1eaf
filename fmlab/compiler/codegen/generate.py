"""The pass that gives fused groups code of their own."""

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.build import NoCompiler, build
from fmlab.compiler.codegen.images import Images, image_function
from fmlab.compiler.codegen.lower import Unsupported, lower
from fmlab.compiler.codegen.maths import HALF, PRELUDE, STREAM
from fmlab.compiler.codegen.rows import RowProgram
from fmlab.compiler.codegen.text import Rows, row_function
from fmlab.compiler.fusion.kernel import FusedKernel, kernels
from fmlab.compiler.fusion.rows import extent, is_pixels, pitch
from fmlab.compiler.passes.base import GraphPass, Report

SMALL = 2**14  # elements below which one thread is faster than several


class GenerateCpp(GraphPass):
    """Generates C++ for fused groups, builds it with the system's compiler, and lets the groups call it.

    fp32, bf16 and fp16 are computed in fp32 and rounded where they are written, fp64 in fp64. A group that
    mixes them runs torch's operators, as does everything on a machine without a compiler: the report says so.

    Args:
        folder: where built files are kept; fmlab/compiler in the user's cache folder if not given.
    """

    name = "C++"
    claims = (
        "equal up to rounding: fp32 functions within 5e-7, sums in another order; NaN and infinities kept"
    )

    def __init__(self, folder: Path | None = None):
        self.folder = folder

    def apply(self, graph: fx.Graph, report: Report) -> None:
        texts: dict[FusedKernel, str] = {}
        programs: dict[FusedKernel, RowProgram] = {}
        for kernel in kernels(graph):
            try:
                programs[kernel] = lower(kernel)
                texts[kernel] = code(programs[kernel], *kernel.space)
            except Unsupported as error:
                report.refused.append(f"{kernel.__name__}: {error}")
        if not texts:
            return
        names = {text: f"rows_{hashlib.sha256(text.encode()).hexdigest()[:12]}" for text in texts.values()}
        try:
            library = build(source(names), self.folder)
        except NoCompiler as error:
            report.refused.append(str(error))
            return
        for kernel, text in texts.items():
            kernel.overwrites = _overwrites(kernel, programs[kernel])
            kernel.code = _caller(kernel, programs[kernel], getattr(library, names[text]))
            report.made["kernel"] += 1
        report.made["C++ function"] += len(names)


def code(program: RowProgram, rows: int, columns: int) -> str:
    """The C++ function of a program, called NAME: over rows, or over images where it has group norms."""
    if not program.groups:
        return row_function(program, "NAME", columns, rows)
    if any(reduction.how != "sum" for reduction in program.reductions) or program.totals or program.checks:
        raise Unsupported("a group norm beside a maximum or a cross-entropy")
    return image_function(program, "NAME", columns)


def _overwrites(kernel: FusedKernel, program: RowProgram) -> dict[int, list[int]]:
    """result -> the inputs of its dtype, size and order whose memory it may take."""
    inputs = [g.value(node) for node in kernel.graph.nodes if node.op == "placeholder"]
    output = next(node for node in kernel.graph.nodes if node.op == "output")
    made = [g.value(node) for node in output.args[0]]
    writes = (Images if program.groups else Rows)(program, kernel.space[1])
    found: dict[int, list[int]] = {}
    for number, sources in program.overwrites(writes.last_reads()).items():
        x = made[number - len(inputs)]
        like = (x.dtype, x.numel(), is_pixels(x))
        same = [k for k in sources if (inputs[k].dtype, inputs[k].numel(), is_pixels(inputs[k])) == like]
        if same:
            found[number - len(inputs)] = same
    return found


def source(names: dict[str, str]) -> str:
    """A file of C++ with these functions: text -> name."""
    parts = [
        text.replace(" NAME(", f" {name}(") for text, name in sorted(names.items(), key=lambda item: item[1])
    ]
    half = [HALF] if any("fp16" in text for text in parts) else []
    stream = [STREAM] if any("f_stream" in text for text in parts) else []
    return "\n\n".join(["#include <omp.h>", PRELUDE, *half, *stream, *parts])


#: The order of memory that is asked for, since small tensors lie in several: the plain one or channels_last,
#: or the shape and strides of parts of wider rows
_Order = torch.memory_format | tuple[tuple[int, ...], tuple[int, ...]]
#: (kind of tensor, dtype, elements, its order if it lies in the one asked for)
_Kind = tuple[type, torch.dtype, int, _Order | None]


def _order(x: Tensor) -> _Order:
    if pitch(x) is not None:
        return tuple(x.shape), tuple(x.stride())
    return torch.channels_last if is_pixels(x) else torch.contiguous_format


def _lies(x: Tensor, order: _Order) -> bool:
    if isinstance(order, tuple):
        return (tuple(x.shape), tuple(x.stride())) == order
    return x.is_contiguous(memory_format=order)


def _kind(x: Tensor, order: _Order) -> _Kind:
    of = torch.Tensor if type(x) is torch.nn.Parameter else type(x)
    return (of, x.dtype, x.numel(), order if _lies(x, order) else None)


def _caller(kernel: FusedKernel, program: RowProgram, function: Any) -> Callable[..., Sequence[Tensor]]:
    """(inputs, out=None) -> results; `out` are tensors to write to, made where not given or None.

    A result may take the memory of an input where kernel.overwrites says so, as in an optimizer's step.
    """
    function.restype = ctypes.c_int
    rows, columns = kernel.space
    inputs = [g.value(node) for node in kernel.graph.nodes if node.op == "placeholder"]
    output = next(node for node in kernel.graph.nodes if node.op == "output")
    made = [g.value(n) for n in output.args[0]]
    orders = [_order(x) for x in (*inputs, *made)]
    new = [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in made]
    pointers = ctypes.c_void_p * len(orders)
    kinds = [(Tensor, x.dtype, x.numel(), order) for x, order in zip((*inputs, *made), orders, strict=True)]
    several = rows * columns >= SMALL
    messages = [message for _, message in program.checks]

    def run(given: Sequence[Tensor], out: Sequence[Tensor | None] | None = None) -> Sequence[Tensor]:
        given = [_in_order(x, order) for x, order in zip(given, orders, strict=False)]
        if out is None:
            results = [torch.empty_strided(*shape, dtype=dtype) for *shape, dtype in new]
        else:
            results = [
                torch.empty_strided(*shape, dtype=dtype) if x is None else x
                for x, (*shape, dtype) in zip(out, new, strict=True)
            ]
            if rows * columns > 1:
                _check_apart(kernel, given, results)
        every = [*given, *results]
        if list(map(_kind, every, orders)) != kinds:
            raise ValueError(f"{kernel} takes and writes plain tensors {kinds}, got {every}")
        addresses = pointers(*(x.data_ptr() for x in every))
        threads = torch.get_num_threads() if several else 1
        failed = function(addresses, ctypes.c_int64(rows), ctypes.c_int64(columns), ctypes.c_int(threads))
        if failed:
            raise ValueError(f"{kernel}: {messages[failed - 1]}")
        return results

    return run


def _in_order(x: Tensor, order: _Order) -> Tensor:
    if not isinstance(order, tuple):
        return x.contiguous(memory_format=order)
    if _lies(x, order) or x.shape != order[0]:
        return x
    return torch.empty_strided(*order, dtype=x.dtype).copy_(x)


def _check_apart(kernel: FusedKernel, given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """A result may not lie on an input that is read again after it was written."""
    taken = [extent(x) for x in given]
    for number, x in enumerate(results):
        start, end = extent(x)
        for k, (low, high) in enumerate(taken):
            whole = (start, end) == (low, high) and k in kernel.overwrites.get(number, ())
            if start < high and low < end and not whole:
                raise ValueError(
                    f"{kernel} reads input {k} again after it writes result {number}: give that memory of "
                    "its own"
                )
