"""Several matrix products of one input become one with the matrices side by side."""

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.passes.base import GraphPass, Report, drop_unread, insert, replace

aten = torch.ops.aten


class MergeProducts(GraphPass):
    """linear(x, q), linear(x, k), linear(x, v) become one product, split again.

    The input is read once instead of three times, and one large product uses a machine better than three
    small ones. The weights are put side by side in each call, because an optimizer changes them: that copy is
    in the bytes of the report, and pays off where there are many more rows than columns of the weights. Left
    alone: fewer than `least` products, and inputs with fewer rows than `rows_per_column` times the width.
    """

    name = "merge products"
    claims = "each result is the same sum; a library may add it up in another order"
    source = True

    def __init__(self, least: int = 3, rows_per_column: float = 0.0):
        self.least, self.rows_per_column = least, rows_per_column

    def apply(self, graph: fx.Graph, report: Report) -> None:
        groups: dict[Any, list[fx.Node]] = defaultdict(list)
        place = {node: number for number, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if node.target is aten.linear.default:
                x, weight, *bias = node.args
                dtype, with_bias = g.value(weight).dtype, bool(bias) and bias[0] is not None
                groups[x, with_bias, dtype].append(node)
        for (x, with_bias, _), products in groups.items():
            if len(products) < 2:
                continue
            rows, width = g.value(x).numel() // g.shape(x)[-1], g.shape(x)[-1]
            names = ", ".join(node.name for node in products)
            if len(products) < self.least:
                report.refused.append(f"{names}: {len(products)} products, fewer than {self.least}")
            elif rows < self.rows_per_column * width:
                report.refused.append(f"{names}: {rows} rows are too few to pay for copying the weights")
            elif late := _made_late(products, place):
                report.refused.append(f"{names}: {late.name} is made after the first of them")
            else:
                self._merge(x, products, with_bias)
                report.made["merged"] += 1
        drop_unread(graph)

    @staticmethod
    def _merge(x: fx.Node, products: list[fx.Node], with_bias: bool) -> None:
        first = products[0]
        weight = insert(first, aten.cat.default, [node.args[1] for node in products])
        bias = insert(first, aten.cat.default, [node.args[2] for node in products]) if with_bias else None
        merged = insert(first, aten.linear.default, x, weight, bias)
        start, parts = 0, []
        for node in products:
            width = g.shape(node)[-1]
            part = insert(first, aten.slice.Tensor, merged, -1, start, start + width)
            start += width
            if not all(_may_view(user, part) for user in node.users):
                part = insert(first, aten.contiguous.default, part)
            parts.append(part)
        for node, part in zip(products, parts, strict=True):
            replace(node, part)


def _may_view(user: fx.Node, part: fx.Node) -> bool:
    """Whether a reader of a product can read a part of the merged one, whose rows lie further apart."""
    if user.target is not aten.view.default:
        return True
    try:
        with g.value(part).fake_mode:
            g.value(part).view(user.args[1])
    except RuntimeError:
        return False
    return True


def _made_late(products: list[fx.Node], place: dict[fx.Node, int]) -> fx.Node | None:
    """A weight or bias that does not exist yet where the first product stands."""
    first = place[products[0]]
    read = [source for node in products for source in node.all_input_nodes]
    return next((source for source in read if place[source] > first), None)
