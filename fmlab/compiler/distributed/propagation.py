"""A walk over a graph: where values are, and sums over ranks in front of what needs partial ones whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.distributed.collective import insert_sum, is_start, is_wait
from fmlab.compiler.distributed.placement import PARTIAL, REPLICATED, Placement, Placements, Shard
from fmlab.compiler.distributed.rules import FACTORIES, localize, place, product
from fmlab.compiler.distributed.vocabulary import along_the_cut
from fmlab.compiler.errors import Line
from fmlab.compiler.lines import line_of_node
from fmlab.compiler.passes.base import Report, insert, propagate, replace

aten = torch.ops.aten


class Propagation:
    """Places the nodes of a graph one after the other.

    Attributes: at: where each node is, at first the inputs. sums: partial node -> its sum over ranks.
        maxima: (node, dim) -> the maximum along the cut. rows: gradients of tables whose rows are cut.
        names, lines: for refusals, the caller's names of inputs, and lines by autograd's numbers.

    Shapes stay those of the whole until `localize`.
    """

    def __init__(
        self, graph: fx.Graph, arriving: Mapping[fx.Node, Placement], ranks: int, group: str, report: Report
    ):
        self.graph, self.ranks, self.group, self.report = graph, ranks, group, report
        self.at: dict[fx.Node, Placements] = dict(arriving)
        self.sums: dict[fx.Node, fx.Node] = {}
        self.maxima: dict[tuple[fx.Node, int], fx.Node] = {}
        self.rows: set[fx.Node] = set()
        self.names: Mapping[fx.Node, str] = {}
        self.lines: Mapping[int, Line] = {}

    def walk(self) -> None:
        """Place every node. Raises ValueError at the first one that cannot be done where its inputs are."""
        for node in list(self.graph.nodes):
            if node.op == "get_attr":
                self.at[node] = REPLICATED
            elif node.op == "call_function" and not node._erased:  # the results of one taken apart go too
                self._visit(node)

    # region visit
    def _visit(self, node: fx.Node) -> None:
        if self._makes_parts_and_adds(node):
            node = self._bias_apart(node)
        if along_the_cut(self, node):
            return
        found = self._place(node)
        if found is None:
            for source in node.all_input_nodes:
                if self.at[source] == PARTIAL:
                    node.replace_input_with(source, self.summed(source, node))
            found = self._place(node)
        if found is None:
            raise ValueError(self._refusal(node))
        self.at[node] = found

    # endregion

    def _place(self, node: fx.Node) -> Placements | None:
        sources = node.all_input_nodes
        if g.name(node) == "getitem":
            found: Any = self.at[sources[0]]
            return found[node.args[1]] if isinstance(found, tuple) else found  # type: ignore[index]
        if _draws(node):
            return None
        if self._all_whole(node):
            return REPLICATED
        return place(node, self._where, self.ranks)

    def _where(self, argument: Any) -> Any:
        return self.at[argument] if isinstance(argument, fx.Node) else REPLICATED

    def _all_whole(self, node: fx.Node) -> bool:
        return all(self.at[source] == REPLICATED for source in node.all_input_nodes)

    def _makes_parts_and_adds(self, node: fx.Node) -> bool:
        """addmm, if its product is a sum of parts."""
        if node.target is not aten.addmm.default or node.kwargs:
            return False
        left, right = node.args[1:3]
        return PARTIAL not in (self.at[left], self.at[right]) and (  # type: ignore[index]
            product(left, right, self._where) == PARTIAL
        )

    def _bias_apart(self, node: fx.Node) -> fx.Node:
        """The product, then its bias, which is to be added once and not by every rank."""
        bias, left, right = node.args
        made = insert(node, aten.mm.default, left, right)
        added = insert(node, aten.add.Tensor, made, bias)
        if "seq_nr" in node.meta:
            made.meta["seq_nr"] = added.meta["seq_nr"] = node.meta["seq_nr"]
        replace(node, added)
        self._visit(made)
        return added

    def add(self, before: fx.Node, target: Any, *args: Any, at: Any = None, **kwargs: Any) -> fx.Node:
        """A new node in front of another one, for the same line, placed by the rules if `at` is not given."""
        node = insert(before, target, *args, **kwargs)
        if "seq_nr" in before.meta:
            node.meta["seq_nr"] = before.meta["seq_nr"]
        if at is None:
            self._visit(node)
        else:
            self.at[node] = at
        return node

    def total(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The node, or the sum of its parts."""
        return self.summed(node, before) if self.at[node] == PARTIAL else node

    def place_late(self, node: Any, where: Shard) -> bool:
        """Cut an empty or filled tensor that only one node reads, and that was taken for whole."""
        made = isinstance(node, fx.Node) and node.target in FACTORIES and len(node.users) == 1
        if made and self.at[node] == REPLICATED:
            self.at[node] = where
        return bool(self.at[node] == where)

    def summed(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The sum over ranks of a partial value, there from `before` on."""
        if node not in self.sums:
            self.sums[node] = wait = insert_sum(before, node, self.group)
            for new in (wait, *wait.all_input_nodes):
                self.at[new] = REPLICATED
            self.report.made["sum"] += 1
        return self.sums[node]

    def whole(self, node: fx.Node, before: fx.Node, what: str) -> fx.Node:
        """The node, or the sum of its parts. Raises ValueError where it is cut."""
        if self.at[node] == PARTIAL:
            return self.summed(node, before)
        if self.at[node] != REPLICATED:
            raise ValueError(
                f"TensorParallel: {what} is {self.at[node]} and must be whole{self.line(node)}\n"
                "  cut the next matrix along dim 1, which makes a sum of parts, or leave this one whole"
            )
        return node

    def localize(self, inputs: Mapping[fx.Node, Any]) -> None:
        """Make all shapes those of one rank. inputs: what a rank has of each input that is cut."""
        self.report.made["value cut"] += sum(isinstance(where, Shard) for where in self.at.values())
        for node in self.graph.nodes:
            if node.op == "placeholder" and isinstance(self.at[node], Shard):
                node.meta["val"] = inputs[node]
            elif is_start(node) or is_wait(node):
                node.meta["val"] = g.value(node.args[0]).new_empty(g.shape(node.args[0]))
            elif node.op == "call_function":
                localize(node, self.at[node], self.ranks)
                propagate(node)

    def line(self, node: fx.Node) -> str:
        """The user's line behind a node, as text to put behind a sentence."""
        found = line_of_node(node) or self.lines.get(node.meta.get("seq_nr", -1))
        return "" if found is None else f"\n  at {found}"

    def _refusal(self, node: fx.Node) -> str:
        if _draws(node):
            return (
                f"TensorParallel: {g.name(node)} draws random numbers, which would differ from rank to rank"
                f"{self.line(node)}\n  capture the model with dropout 0, or in eval mode"
            )
        inputs = [f"{self.names.get(s, s.name)} {_shape(s)} ({self.at[s]})" for s in node.all_input_nodes]
        return (
            f"TensorParallel: no placement is known of {g.name(node)} of {', '.join(inputs)}"
            f"{self.line(node)}\n  cut its inputs alike, cut the matrix before it otherwise, or not at all"
        )


def _draws(node: fx.Node) -> bool:
    """Whether each rank would draw its own numbers. Attention without dropout is only marked as if it did."""
    if not g.is_random(node):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _shape(node: fx.Node) -> Sequence[int]:
    found = g.tensors(node)
    return list(found[0].shape) if found else []
