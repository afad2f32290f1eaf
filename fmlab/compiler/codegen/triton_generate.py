"""The pass that gives fused groups Triton kernels: compiled for the GPU that their tensors are on, or, on the
CPU, run by Triton's interpreter."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.build import cache_folder
from fmlab.compiler.codegen.lower import Unsupported
from fmlab.compiler.codegen.triton_lower import lower
from fmlab.compiler.codegen.triton_source import load, source
from fmlab.compiler.codegen.triton_tiles import tiles, traffic
from fmlab.compiler.fusion.kernel import FusedKernel, kernels
from fmlab.compiler.fusion.rows import extent, is_pixels, pitch
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
                kernel.overwrites = {}  # of other code than this
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
        self.group, self.lowered = group, lower(group)
        self.tiles = tiles(group, self.lowered)
        name, self.source = source(group, self.lowered, self.tiles)
        self.file, self.kernel = load(name, self.source, cache_folder() if folder is None else folder)
        nodes = list(group.graph.nodes)
        output = next(node for node in nodes if node.op == "output")
        self.inputs = [g.value(node) for node in nodes if node.op == "placeholder"]
        self.results = [g.value(node) for node in output.args[0]]
        self.kinds = [(torch.Tensor, x.dtype, x.numel()) for x in (*self.inputs, *self.results)]

    @property
    def traffic(self) -> Traffic:
        """Bytes that the programs of a call load and store, partial sums among them."""
        return traffic(self.group, self.lowered, self.tiles)

    def __call__(
        self, given: Sequence[Tensor], out: Sequence[Tensor | None] | None = None
    ) -> Sequence[Tensor]:
        """The group's results; `out` are tensors to write to, made where not given or None.

        Raises ValueError for tensors that are not like those of the graph, and results in inputs' memory.
        """
        from fmlab.kernels.triton.launch import warps_for

        place = given[0].device
        given = [_laid_out(x, like) for x, like in zip(given, self.inputs, strict=True)]
        out = [None] * len(self.results) if out is None else out
        pairs = zip(out, self.results, strict=True)
        results = [_empty(like, place) if one is None else one for one, like in pairs]
        if any(_overlap(x, read) for x in out if x is not None for read in given):
            raise ValueError(f"{self.group}: a result lies in the memory of an input; give it its own")
        found = [
            _kind(x, like) for x, like in zip((*given, *results), (*self.inputs, *self.results), strict=True)
        ]
        if found != self.kinds:
            raise ValueError(f"{self.group} takes and writes plain tensors {self.kinds}, got {found}")
        shape, lowered, first = self.tiles, self.lowered, len(given)
        wide = torch.float64 if lowered.dtype == "tl.float64" else torch.float32
        sums = {n: self._partial(results[n - first], wide) for n, kind in lowered.writes if kind == "sum"}
        written = [sums.get(n, results[n - first]) for n, _ in lowered.writes]
        totals = [torch.empty(shape.programs, dtype=wide, device=place) for _ in lowered.totals]
        self.kernel[shape.grid](
            *(given[number] for number, _ in lowered.reads), *written, *totals,
            *shape.numbers.values(), shape.tile, shape.block, num_warps=warps_for(shape.tile * shape.block),
        )  # fmt: skip
        for number, partial in sums.items():
            if partial is not results[number - first]:
                results[number - first].view(-1).copy_(partial.sum(0))
        for number, total in lowered.ends:
            whole = totals[total.of].sum()
            results[number - first].copy_(whole if total.over is None else whole / totals[total.over].sum())
        return results

    def _partial(self, result: Tensor, wide: torch.dtype) -> Tensor:
        """[programs down, columns], a sum of each, not yet rounded; the result itself if there is one."""
        down, columns = self.tiles.grid[0], self.tiles.numbers["COLUMNS"]
        return result if down == 1 else result.new_empty(down, columns, dtype=wide)

    def __repr__(self) -> str:
        return f"TritonGroup({self.group}, {self.tiles.programs:,} programs, {self.file.name})"


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the order of memory that the graph was captured for, copied if need be."""
    if pitch(like) is None:
        return x.contiguous(memory_format=_order(like))
    if x.stride() == like.stride() or x.shape != like.shape:
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory: what lies between a tensor's rows counts as its own."""
    (first, end), (other, last) = extent(a), extent(b)
    return first < last and other < end


def _empty(like: Tensor, place: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=place, memory_format=_order(like))


def _order(like: Tensor) -> torch.memory_format:
    return torch.channels_last if is_pixels(like) else torch.contiguous_format


def _kind(x: Tensor, like: Tensor) -> tuple[type, torch.dtype, int]:
    """What a kernel must know of a tensor: its class, its dtype, and its elements if they lie in order."""
    kind = torch.Tensor if type(x) is torch.nn.Parameter else type(x)
    parts = (x.shape, x.stride()) == (like.shape, like.stride())
    lies = parts if pitch(like) is not None else x.is_contiguous(memory_format=_order(like))
    return (kind, x.dtype, x.numel() if lies else -1)
