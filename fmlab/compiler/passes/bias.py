"""A bias that a matrix product adds becomes an addition of its own, where a fused group can take it over."""

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.fusion.operators import BY_ROW, ELEMENTWISE
from fmlab.compiler.fusion.rows import is_transparent
from fmlab.compiler.passes.base import GraphPass, Report, insert, replace

aten = torch.ops.aten


class SplitBias(GraphPass):
    """addmm(bias, x, w) whose result goes into a GELU, or another operator that can be fused, becomes x @ w
    and an addition: fusion then makes one group of bias and GELU, which reads the product once.

    Alone this moves more bytes, so run `Fusion` after it. Left alone: a product that nothing fusible reads,
    factors beside the product, and results that the caller gets as they are.
    """

    name = "split bias"
    claims = "the same sum, rounded once more"

    def apply(self, graph: fx.Graph, report: Report) -> None:
        for node in list(graph.nodes):
            if node.target is not aten.addmm.default:
                continue
            bias, x, weight = node.args[:3]
            if any(node.kwargs.get(key, 1) != 1 for key in ("alpha", "beta")):
                report.refused.append(f"{node.name} has a factor")
            elif not isinstance(bias, fx.Node) or g.value(bias).dim() != 1:
                report.refused.append(f"{node.name} adds something else than a bias")
            elif not any(_fusible(reader) for reader in _readers(node)):
                report.refused.append(f"{node.name}: nothing that reads it can be fused")
            else:
                product = insert(node, aten.mm.default, x, weight)
                replace(node, insert(node, aten.add.Tensor, product, bias))
                report.made["split"] += 1


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a node, seen through views that leave rows as they are."""
    found = []
    for user in node.users:
        found += _readers(user) if user.op == "call_function" and is_transparent(user) else [user]
    return found


def _fusible(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(g.value(node), Tensor | tuple):
        return False
    return node.target is aten.gelu.default or node.target in ELEMENTWISE or node.target in BY_ROW
