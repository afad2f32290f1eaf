"""Tensor parallelism as a pass: from a graph of one device to the one graph that each of several ranks runs.

The caller names the matrices that are cut. Placements spread from them through the forward graph and on into
the backward graph; where a sum of parts is read by what needs it whole, an all-reduce is put in front. For
Megatron's block (Shoeybi et al. 2019, arXiv:1909.08053, section 3) these are its g in the forward graph and
its f in the backward graph, which nobody wrote down.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.distributed.collective import Group, group_name
from fmlab.compiler.distributed.placement import (
    REPLICATED,
    Placement,
    Placements,
    Shard,
    local_shape,
    placed,
)
from fmlab.compiler.distributed.propagation import Propagation
from fmlab.compiler.errors import Line
from fmlab.compiler.flat import Input
from fmlab.compiler.lines import lines_by_number
from fmlab.compiler.passes.base import GraphPass, Report


class TensorParallel(GraphPass):
    """Divides a program's graphs over ranks: named parameters are cut, all others whole on every rank.

    It works on both graphs of a program, the forward graph first, and once. Capture the whole model, run this
    pass, then give each rank its pieces of the weights (`shard_parameters`). Inputs and results are whole on
    every rank, and so is the gradient that comes in.

    Args:
        group: see collective.group_name.
        sharded: parameter name -> the dim along which it is cut, or a Shard. A bias behind a matrix that is
            cut along dim 0 (its outputs) is cut along dim 0 too; one behind a matrix that is cut along dim 1
            (its inputs) is whole.
        ranks: how many; needed only if `group` is a name.

    Attributes: placements: graph -> node -> where its value is, for the graphs done so far.

    A token table may be cut along dim 0, the vocabulary, also where it is the output matrix: look-ups and
    cross-entropy are taken apart (vocabulary.py). T5's table of relative positions is cut along dim 1, heads.

    Raises ValueError for unknown names and dims that cannot be cut evenly, and, with the line of the user's
    code, for an operator that cannot be done where its inputs are. Both graphs are tried on copies first: a
    program that is refused stays as it was.
    """

    name = "tensor parallel"
    claims = "results, and gradients of whole and of cut parameters, are on each rank those of one device"

    def __init__(self, group: Group, sharded: Mapping[str, int | Shard], ranks: int | None = None):
        if ranks is None:
            if isinstance(group, str):
                raise ValueError("a group's name does not tell how many ranks it has; give ranks=")
            ranks = torch.distributed.get_world_size(group() if callable(group) else group)
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; legal: 1 or more")
        self.group, self.sharded, self.ranks = group, dict(sharded), ranks
        self.placements: dict[str, dict[str, Placements]] = {}
        self._saved: list[tuple[Any, Tensor]] = []  # where it is, and what of it a rank has
        self._lines: dict[int, Line] = {}

    def run(self, graph: fx.Graph) -> Report:
        module = graph.owning_module
        if module is not None and "inputs" in module.meta and not module.meta.get("divided"):
            self._try(module)
        return super().run(graph)

    def _try(self, forward: fx.GraphModule) -> None:
        """Divide copies of the forward graph and of its backward graph."""
        trial = TensorParallel(self.group, self.sharded, self.ranks)
        for module in (forward, forward.meta.get("backward")):
            if module is not None:
                twin = copy.deepcopy(module)
                twin.meta = dict(module.meta)
                if "inputs" in twin.meta:
                    twin.meta["inputs"] = list(twin.meta["inputs"])
                super(TensorParallel, trial).run(twin.graph)

    def apply(self, graph: fx.Graph, report: Report) -> None:
        module = graph.owning_module
        meta = {} if module is None else module.meta
        if "inputs" in meta:
            self._forward(graph, meta, report)
        elif "gradients_of" in meta:
            self._backward(graph, meta, report)
        else:
            raise ValueError("TensorParallel works on the graphs of a captured Program; this is another one")

    def _forward(self, graph: fx.Graph, meta: dict[str, Any], report: Report) -> None:
        inputs: list[Input] = meta["inputs"]
        if meta.get("divided"):
            raise ValueError("this program is divided over ranks already; capture the model again")
        cut = self._cut({entry.name: entry for entry in inputs if entry.kind == "parameter"})
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        names = {node: entry.name for node, entry in zip(placeholders, inputs, strict=True)}
        arriving = {node: cut.get(name, REPLICATED) for node, name in names.items()}
        self._lines = lines_by_number(graph)
        work = self._propagated(graph, arriving, report, names)
        output = next(node for node in graph.nodes if node.op == "output")
        results, saved = output.args[0][: meta["results"]], output.args[0][meta["results"] :]
        results = [work.whole(node, output, f"result {i}") for i, node in enumerate(results)]
        saved = [work.sums.get(node, node) for node in saved]
        output.args = ((*results, *saved),)
        shapes = {node: local_shape(g.shape(node), where, self.ranks) for node, where in arriving.items()}
        work.localize({node: g.value(node).new_empty(shape) for node, shape in shapes.items()})
        self._saved = [(work.at[node], g.value(node)) for node in saved]
        self._done("forward", meta, work)
        for index, entry in enumerate(inputs):
            if entry.kind == "parameter" and entry.name in cut:
                inputs[index] = _local(entry, cut[entry.name], self.ranks)

    def _cut(self, known: Mapping[str, Input]) -> dict[str, Shard]:
        cut = placed(self.sharded, known)
        for name, shard in cut.items():
            try:
                local_shape(known[name].shape, shard, self.ranks)
            except ValueError as error:
                raise ValueError(f"TensorParallel: parameter {name}: {error}") from None
        return cut

    def _backward(self, graph: fx.Graph, meta: dict[str, Any], report: Report) -> None:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        if meta.get("divided") or len(placeholders) != len(self._saved) + meta["tangents"]:
            raise ValueError(
                "TensorParallel divides a forward graph first, then its backward graph, each once"
            )
        arriving: dict[fx.Node, Placement] = dict.fromkeys(placeholders, REPLICATED)
        arriving |= {node: where for node, (where, _) in zip(placeholders, self._saved, strict=False)}
        rows = self._rows(meta["gradients_of"], graph)
        work = self._propagated(graph, arriving, report, {}, rows)
        output = next(node for node in graph.nodes if node.op == "output")
        gradients = [
            None if node is None else self._gradient(work, node, output, entry)
            for entry, node in zip(meta["gradients_of"], output.args[0], strict=True)
        ]
        output.args = (tuple(gradients),)
        work.localize({node: value for node, (_, value) in zip(placeholders, self._saved, strict=False)})
        self._done("backward", meta, work)

    def _gradient(self, work: Propagation, node: fx.Node, output: fx.Node, entry: Input) -> fx.Node:
        """A gradient lies where its parameter does."""
        cut = placed(self.sharded, self.sharded).get(entry.name) if entry.kind == "parameter" else None
        if cut is None:
            return work.whole(node, output, f"the gradient of {entry.name}")
        if work.at[node] != cut:
            raise ValueError(
                f"TensorParallel: {entry.name} is {cut}, its gradient {work.at[node]}{work.line(node)}\n"
                "  cut what it meets in the same way, or leave it whole"
            )
        return node

    def _rows(self, inputs: Sequence[Input], graph: fx.Graph) -> set[fx.Node]:
        """The gradients of look-ups in tables whose rows are cut; a tied table's is one term of a sum."""
        output = next(node for node in graph.nodes if node.op == "output")
        cut = placed(self.sharded, self.sharded)
        found: set[fx.Node] = set()
        for entry, gradient in zip(inputs, output.args[0], strict=True):
            stack = [gradient] if entry.kind == "parameter" and cut.get(entry.name) == Shard(0) else []
            while stack:
                node = stack.pop()
                if isinstance(node, fx.Node) and node.target is torch.ops.aten.add.Tensor:
                    stack += node.all_input_nodes
                elif isinstance(node, fx.Node) and g.name(node) == "embedding_dense_backward":
                    found.add(node)
        return found

    def _propagated(
        self,
        graph: fx.Graph,
        arriving: Mapping[fx.Node, Placement],
        report: Report,
        names: Mapping[fx.Node, str],
        rows: Collection[fx.Node] = (),
    ) -> Propagation:
        work = Propagation(graph, arriving, self.ranks, group_name(self.group), report)
        work.names, work.lines, work.rows = names, self._lines, set(rows)
        work.walk()
        return work

    def _done(self, name: str, meta: dict[str, Any], work: Propagation) -> None:
        meta["divided"] = True
        self.placements[name] = {node.name: where for node, where in work.at.items()}


def _local(entry: Input, shard: Shard, ranks: int) -> Input:
    """The input of one rank: its piece, contiguous."""
    shape = local_shape(entry.shape, shard, ranks)
    return replace(entry, shape=shape, stride=torch.empty(shape, device="meta").stride())
