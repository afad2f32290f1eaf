"""The pass that gives fused groups Triton kernels: compiled for the GPU that their tensors are on, or, on the
CPU, run by Triton's interpreter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen import triton_source
from fmlab.compiler.codegen.build import cache_folder
from fmlab.compiler.codegen.triton_lower import Unsupported, lower
from fmlab.compiler.fusion.kernel import FusedKernel, kernels
from fmlab.compiler.passes.base import GraphPass, Report
from fmlab.extras import require
from fmlab.kernels.triton.traffic import Traffic

_INSTEAD = "Fused groups run torch's operators one after another instead"


class GenerateTriton(GraphPass):
    """Writes a Triton kernel for each fused group, in a file to be read, and lets the groups launch them.

    On a GPU they are compiled at the first call. On the CPU Triton's interpreter runs them, thousands of
    times slower: for reading, tests and counting bytes. A group whose kernel cannot be written runs torch's
    operators, as do all where Triton is not installed: the report says so.

    Args:
        folder: where the files are kept; fmlab/compiler in the user's cache folder if not given.
    """

    name = "Triton"
    claims = (
        "equal up to rounding: a GPU's approximate functions, sums in another order; NaN and infinities kept"
    )

    def __init__(self, folder: Path | None = None):
        self.folder = folder

    def apply(self, graph: fx.Graph, report: Report) -> None:
        groups = kernels(graph)
        try:
            if groups:
                require("kernels", "triton")
        except ImportError as error:
            report.refused.append(f"no Triton: {error}. {_INSTEAD}")
            return
        files = set()
        for kernel in groups:
            try:
                kernel.code = made = TritonGroup(kernel, self.folder)
            except Unsupported as error:
                report.refused.append(f"{kernel.__name__}: {error}")
            except OSError as error:
                report.refused.append(f"the kernels' files cannot be kept: {error}. {_INSTEAD}")
                return
            else:
                files.add(made.file)
                report.made["kernel"] += 1
        if files:
            report.made["file"] += len(files)


class TritonGroup:
    """A fused group as a Triton kernel. Called with the group's inputs, it launches the kernel.

    Attributes: source: the text of its `file`. kernel: the function in it, to be launched. tiles: how its
    programs share the space. traffic: the bytes that they load and store (modelled; fmlab.kernels.triton's
    `count_bytes` counts them).
    """

    devices = ("cpu", "cuda")

    def __init__(self, group: FusedKernel, folder: Path | None = None):
        self.lowered = lower(group)
        self.tiles = triton_source.tiles(group, self.lowered)
        name, self.source = triton_source.source(group, self.lowered)
        folder = cache_folder() if folder is None else folder
        self.file, self.kernel = triton_source.load(name, self.source, folder)
        self.group = group
        nodes = list(group.graph.nodes)
        output = next(node for node in nodes if node.op == "output")
        taken = [g.value(node) for node in nodes if node.op == "placeholder"]
        self.made = [(tuple(g.value(n).shape), g.value(n).dtype) for n in output.args[0]]
        self.kinds = [(torch.Tensor, x.dtype, x.numel()) for x in (*taken, *map(g.value, output.args[0]))]

    @property
    def traffic(self) -> Traffic:
        """Bytes that the programs of a call load and store, partial sums among them."""
        return triton_source.traffic(self.group, self.lowered, self.tiles)

    def __call__(self, given: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """The group's results; `out` are tensors to write to, made if not given.

        Raises ValueError for tensors that are not like those of the graph.
        """
        from fmlab.kernels.triton.launch import warps_for

        given = [x if x.is_contiguous() else x.contiguous() for x in given]
        place = given[0].device
        results = [torch.empty(s, dtype=d, device=place) for s, d in self.made] if out is None else list(out)
        if [_kind(x) for x in (*given, *results)] != self.kinds:
            raise ValueError(
                f"{self.group} takes and writes plain tensors {self.kinds}, got {[*given, *results]}"
            )
        shape, first = self.tiles, len(given)
        sums = {n: self._partial(results[n - first]) for n, kind in self.lowered.writes if kind == "sum"}
        written = [sums.get(n, results[n - first]) for n, _ in self.lowered.writes]
        read = [given[number] for number, _ in self.lowered.reads]
        warps = warps_for(shape.tile * shape.block)
        self.kernel[shape.grid](
            *read, *written, shape.rows, shape.columns, shape.tile, shape.block, num_warps=warps
        )
        for number, partial in sums.items():
            if partial is not results[number - first]:
                torch.sum(partial, 0, out=results[number - first].view(-1))
        return results

    def _partial(self, result: Tensor) -> Tensor:
        """[programs, columns], a sum of each program; the result itself if there is one program."""
        if self.tiles.programs == 1:
            return result
        return result.new_empty(self.tiles.programs, self.tiles.columns)

    def __repr__(self) -> str:
        return f"TritonGroup({self.group}, {self.tiles.programs:,} programs, {self.file.name})"


def _kind(x: Any) -> tuple[type, torch.dtype, int]:
    """What a kernel must know of a tensor: its class, its dtype, and its elements if they lie in order."""
    kind = torch.Tensor if type(x) is torch.nn.Parameter else type(x)
    return (kind, x.dtype, x.numel() if x.is_contiguous() else -1)
