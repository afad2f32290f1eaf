"""The pass that gives fused groups code of their own."""

import ctypes
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.build import NoCompiler, build
from fmlab.compiler.codegen.lower import Unsupported, lower
from fmlab.compiler.codegen.maths import PRELUDE
from fmlab.compiler.fusion.kernel import FusedKernel, kernels
from fmlab.compiler.passes.base import GraphPass, Report

SMALL = 2**14  # elements below which one thread is faster than several


class GenerateCpp(GraphPass):
    """Generates C++ for fused groups, builds it with the system's compiler, and lets the groups call it.

    What is not fp32 or fp64 runs torch's operators, as does everything on a machine without a compiler: the
    report says so.

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
        for kernel in kernels(graph):
            try:
                texts[kernel] = lower(kernel).code("NAME")
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
            kernel.code = _caller(kernel, getattr(library, names[text]))
            report.made["kernel"] += 1
        report.made["C++ function"] += len(names)


def source(names: dict[str, str]) -> str:
    """A file of C++ with these functions: text -> name."""
    parts = [
        text.replace(" NAME(", f" {name}(") for text, name in sorted(names.items(), key=lambda item: item[1])
    ]
    return "\n\n".join(["#include <omp.h>", PRELUDE, *parts])


def _kind(x: Tensor) -> tuple[type, torch.dtype, int]:
    kind = torch.Tensor if type(x) is torch.nn.Parameter else type(x)
    return (kind, x.dtype, x.numel() if x.is_contiguous() else -1)


def _caller(kernel: FusedKernel, function: Any) -> Callable[..., Sequence[Tensor]]:
    """(inputs, out=None) -> results; `out` are tensors to write to, made if not given."""
    function.restype = None
    rows, columns = kernel.space
    inputs = [g.value(node) for node in kernel.graph.nodes if node.op == "placeholder"]
    output = next(node for node in kernel.graph.nodes if node.op == "output")
    made = [(tuple(g.value(n).shape), g.value(n).dtype) for n in output.args[0]]
    pointers = ctypes.c_void_p * (len(inputs) + len(made))
    kinds = [(torch.Tensor, x.dtype, x.numel()) for x in inputs]
    kinds += [(torch.Tensor, dtype, math.prod(shape)) for shape, dtype in made]
    several = rows * columns >= SMALL

    def run(given: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        given = [x if x.is_contiguous() else x.contiguous() for x in given]
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in made] if out is None else out
        if [_kind(x) for x in (*given, *results)] != kinds:
            raise ValueError(f"{kernel} takes and writes plain tensors {kinds}, got {[*given, *results]}")
        addresses = pointers(*(x.data_ptr() for x in (*given, *results)))
        threads = torch.get_num_threads() if several else 1
        function(addresses, ctypes.c_int64(rows), ctypes.c_int64(columns), ctypes.c_int(threads))
        return results

    return run
