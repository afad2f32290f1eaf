"""Orders of dims: transposes that meet their inverse vanish, and with them the copies that they forced."""

from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.passes.base import GraphPass, Report, drop_unread, escaping, insert, replace

aten = torch.ops.aten

#: Operators of one tensor that treat every element alike, so that they commute with any order of dims.
ELEMENTWISE = {
    getattr(aten, name).default
    for name in (
        "relu",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "exp",
        "log",
        "neg",
        "rsqrt",
        "sqrt",
        "abs",
        "erf",
    )
}


class Layout(GraphPass):
    """Cancels orders of dims, pushes them behind elementwise operators to meet others, drops needless copies.

    An order is pushed only if nobody else reads what it orders: otherwise one copy would become two. A copy
    stays if the caller gets it.
    """

    name = "layout"
    claims = "orders of dims compose exactly; no arithmetic changes"

    def apply(self, graph: fx.Graph, report: Report) -> None:
        for node in list(graph.nodes):
            if node.op == "call_function" and not self._cancel(node, report):
                self._push(node, report)
        for node in list(graph.nodes):
            if node.op == "call_function" and not self._cancel(node, report):
                self._drop_copy(graph, node, report)
        drop_unread(graph)

    @staticmethod
    def _cancel(node: fx.Node, report: Report) -> bool:
        """permute of permute becomes one permute, or nothing."""
        outer = order(node)
        inner_node = node.args[0] if node.args else None
        inner = order(inner_node) if isinstance(inner_node, fx.Node) else None
        if outer is None or inner is None:
            return False
        assert isinstance(inner_node, fx.Node)
        first = inner_node.args[0]
        assert isinstance(first, fx.Node)
        both = [inner[dim] for dim in outer]
        if both == sorted(both):
            report.made["cancelled"] += 1
            replace(node, first)
        else:
            report.made["composed"] += 1
            replace(node, insert(node, aten.permute.default, first, both))
        return True

    @staticmethod
    def _push(node: fx.Node, report: Report) -> None:
        """f(permute(x)) becomes permute(f(x))."""
        source = node.args[0] if node.args else None
        if (
            node.target not in ELEMENTWISE
            or not isinstance(source, fx.Node)
            or (dims := order(source)) is None
        ):
            return
        if not any(order(user) is not None for user in node.users):
            return  # it would meet nothing
        if len(source.users) > 1:
            report.refused.append(f"{source.name} has a second reader")
            return
        made = insert(node, node.target, source.args[0], *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
        ordered = insert(node, aten.permute.default, made, dims)
        report.made["pushed"] += 1
        replace(node, ordered)

    @staticmethod
    def _drop_copy(graph: fx.Graph, node: fx.Node, report: Report) -> None:
        """clone(x) becomes x where x has that layout already."""
        if node.target is not aten.clone.default:
            return
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if g.value(source).stride() != g.value(node).stride():
            return
        if node in escaping(graph):
            report.refused.append(f"{node.name} is given to the caller as a tensor of its own")
            return
        report.made["copy dropped"] += 1
        replace(node, source)


def order(node: fx.Node) -> list[int] | None:
    """Which dim of the input each dim of the result is, for a node that only orders dims; else None."""
    if not node.args or not isinstance(node.args[0], fx.Node) or not isinstance(g.value(node), Tensor):
        return None
    dims = list(range(g.value(node).dim()))
    if node.target is aten.permute.default:
        wanted: Any = node.args[1]
        return [dim % len(dims) for dim in wanted]
    if node.target is aten.t.default and len(dims) == 2:
        return [1, 0]
    if node.target is aten.transpose.int:
        swapped: Any = node.args[1:3]
        a, b = (dim % len(dims) for dim in swapped)
        dims[a], dims[b] = dims[b], dims[a]
        return dims
    return None
