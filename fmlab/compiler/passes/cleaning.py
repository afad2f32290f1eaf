"""Passes that every compiler has: shapes, constants, common subexpressions, dead code."""

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fmlab.compiler import graph as g
from fmlab.compiler.passes.base import GraphPass, Report, drop_unread, escaping, propagate, replace

aten = torch.ops.aten


class ShapePropagation(GraphPass):
    """Works out shape and dtype of every node anew, and counts those that were missing or differ."""

    name = "shapes"
    claims = "node.meta['val'] is the shape, dtype and layout of each result; the graph stays as it is"

    def apply(self, graph: fx.Graph, report: Report) -> None:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            before = _kinds(node)
            propagate(node)
            if before != _kinds(node):
                report.made["corrected"] += 1
            report.made["known"] += 1


def _kinds(node: fx.Node) -> Any:
    return [(x.shape, x.dtype, x.stride()) for x in g.tensors(node)]


#: Operators that make a tensor from numbers alone.
FACTORIES = {
    aten.full.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.zeros.default,
    aten.ones.default,
    aten.eye.default,
    aten.linspace.default,
    torch.ops.prims.iota.default,
}


class ConstantFolding(GraphPass):
    """Works out once what depends on no input: positions, masks, filled tensors.

    Tensors that the function refers to are not constants: they may change between calls. Nor is what the
    caller gets, who may write to it, nor what would keep more than `most_bytes`, nor a mere filled tensor.
    """

    name = "constants"
    claims = "nodes that depend on numbers alone become stored tensors; same operators, so the same bits"

    def __init__(self, most_bytes: int = 2**20):
        self.most_bytes = most_bytes

    def apply(self, graph: fx.Graph, report: Report) -> None:
        kept = escaping(graph)
        known: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            sources = node.all_input_nodes
            ready = all(source in known for source in sources)
            if (
                node.op == "call_function"
                and g.is_pure(node)
                and ready
                and (sources or node.target in FACTORIES)
            ):
                args, kwargs = pytree.tree_map_only(fx.Node, known.__getitem__, (node.args, node.kwargs))
                known[node] = node.target(*args, **kwargs)
        for node in list(known):
            edge = any(user not in known for user in node.users)
            filled = node.target is aten.full.default  # one number: cheaper to write than to keep and read
            if not edge or filled or not isinstance(known[node], torch.Tensor):
                continue
            if node in kept:
                report.refused.append(f"{node.name} is given to the caller, who may write to it")
            elif g.nbytes(node) > self.most_bytes:
                report.refused.append(f"{node.name} would keep {g.nbytes(node):,} bytes")
            else:
                self._store(node, known[node])
                report.made["folded"] += 1
        drop_unread(graph)

    @staticmethod
    def _store(node: fx.Node, constant: torch.Tensor) -> None:
        module = node.graph.owning_module
        assert module is not None
        # one name for each constant of both graphs: recompute() carries them from one to the other
        name = f"_folded_{'backward' if 'gradients_of' in module.meta else 'forward'}_{node.name}"
        while hasattr(module, name):
            name += "_"
        module.register_buffer(name, constant.clone(), persistent=False)
        with node.graph.inserting_before(node):
            stored = node.graph.get_attr(name)
        stored.meta["val"] = node.meta["val"]
        replace(node, stored)


class CommonSubexpressions(GraphPass):
    """Computes once what is computed twice from the same inputs.

    Random operators are not the same twice, and two results of the caller stay two tensors.
    """

    name = "common subexpressions"
    claims = "of equal pure calls the first one stays: the same bits"

    def apply(self, graph: fx.Graph, report: Report) -> None:
        kept, first = escaping(graph), {}
        for node in list(graph.nodes):
            if node.op == "call_function" and g.is_random(node):
                report.refused.append(f"{node.name} draws random numbers")
            if node.op != "call_function" or not g.is_pure(node):
                continue
            key = _key((node.target, node.args, tuple(sorted(node.kwargs.items()))))
            if key not in first:
                first[key] = node
            elif node in kept and first[key] in kept:
                report.refused.append(f"{node.name} and {first[key].name} are two results of the caller")
            else:
                report.made["joined"] += node.target is not operator.getitem
                if node in kept:
                    kept.add(first[key])
                replace(node, first[key])


def _key(thing: Any) -> Any:
    """Something hashable that is equal only for equal calls: 1, 1.0 and True differ, 0.0 and -0.0 too."""
    if isinstance(thing, tuple | list):
        return ("list", *map(_key, thing))
    return (type(thing).__name__, repr(thing)) if isinstance(thing, int | float | complex) else thing


class DeadCode(GraphPass):
    """Drops what nobody reads. Random operators stay: without them, later ones would draw other numbers."""

    name = "dead code"
    claims = "pure nodes without readers go; results and random numbers stay"

    def apply(self, graph: fx.Graph, report: Report) -> None:
        if gone := drop_unread(graph):
            report.made["dropped"] += gone
        unread = (node for node in g.calls(graph) if not node.users and not g.is_pure(node))
        report.refused += [f"{node.name} draws random numbers or has effects" for node in unread]
