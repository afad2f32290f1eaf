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

    On a CPU this saves what no count shows: torch's addmm first spreads the bias over its result, and then
    adds the product to that. It costs a write if the sum is needed elsewhere too, so it is done only where
    one reader takes it. A sum that is kept for the backward graph, as that of a GELU is, is not kept any
    longer: the product is, and the backward graph adds the bias again.

    Alone this moves more bytes, so run `Fusion` after it. Left alone: a product that nothing fusible reads,
    or several do, factors beside the product, and sums that the caller gets, or the backward graph as such.
    """

    name = "split bias"
    claims = "the same sum, rounded once more"

    def apply(self, graph: fx.Graph, report: Report) -> None:
        for node in list(graph.nodes):
            if node.target is not aten.addmm.default:
                continue
            if why := _why_not(node):
                report.refused.append(f"{node.name}{why}")
                continue
            bias, x, weight = node.args[:3]
            product = insert(node, aten.mm.default, x, weight)
            for kept in _kept(node):
                _keep_product(graph, kept, product, bias)
                report.made["product kept"] += 1
            replace(node, insert(node, aten.add.Tensor, product, bias))
            report.made["split"] += 1


def _why_not(node: fx.Node) -> str | None:
    bias = node.args[0]
    if any(node.kwargs.get(key, 1) != 1 for key in ("alpha", "beta")):
        return " has a factor"
    if not isinstance(bias, fx.Node) or g.value(bias).dim() != 1:
        return " adds something else than a bias"
    readers = _readers(node)
    if not any(_fusible(reader) for reader in readers):
        return ": nothing that reads it can be fused"
    if g.value(node).device.type != "cpu":
        return ": there a product adds its bias as it is written"
    if len(readers) > 1:
        return ": its sum has several readers, and would be written once more"
    if any(_taken(node.graph, kept) is None for kept in _kept(node)):
        return ": its sum is needed as such, and would be written once more"
    return None


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a node, seen through views that leave rows as they are; not counting results of the graph."""
    found = []
    for user in node.users:
        if user.op != "output":
            found += _readers(user) if is_transparent(user) else [user]
    return found


def _kept(node: fx.Node) -> list[fx.Node]:
    """The node and such views of it, where they are results of the graph."""
    views = [
        view for user in node.users if user.op != "output" and is_transparent(user) for view in _kept(user)
    ]
    return [node] * any(user.op == "output" for user in node.users) + views


def _taken(graph: fx.Graph, kept: fx.Node) -> fx.Node | None:
    """The input of the backward graph that a result of the forward graph is; None for one that the caller
    gets, or that somebody there reads who cannot add a bias on the way."""
    module = graph.owning_module
    backward = None if module is None else module.meta.get("backward")
    if module is None or backward is None or backward.meta.get("forward") is not module:
        return None
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    if results.count(kept) != 1 or (place := results.index(kept)) < module.meta["results"]:
        return None
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
    taken: fx.Node = inputs[place - module.meta["results"]]
    readers = _readers(taken)
    return taken if readers and all(map(_fusible, readers)) and not _kept(taken) else None


def _keep_product(graph: fx.Graph, kept: fx.Node, product: fx.Node, bias: fx.Node) -> None:
    """Hand over `product`, shaped as `kept` is, in its place, and the bias; the backward graph adds them."""
    taken = _taken(graph, kept)
    assert taken is not None
    assert graph.owning_module is not None
    results = graph.owning_module.meta["results"]
    output = next(node for node in graph.nodes if node.op == "output")
    like = list(g.shape(kept))
    shaped = product if list(g.shape(product)) == like else insert(output, aten.view.default, product, like)
    handed = [shaped if node is kept else node for node in output.args[0]]
    inputs = [node for node in taken.graph.nodes if node.op == "placeholder"]
    if bias in handed[results:]:
        there = inputs[handed.index(bias, results) - results]
    else:
        tangent = inputs[len(handed) - results]
        with taken.graph.inserting_before(tangent):
            there = taken.graph.placeholder(f"{bias.name}_bias")
        there.meta = dict(bias.meta)
        handed.append(bias)
    output.args = (tuple(handed),)
    first = next(node for node in taken.graph.nodes if node in taken.users)
    total = insert(first, aten.add.Tensor, taken, there)
    taken.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def _fusible(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(g.value(node), Tensor | tuple):
        return False
    gelu = node.target in (aten.gelu.default, aten.gelu_backward.default)
    return gelu or node.target in ELEMENTWISE or node.target in BY_ROW
