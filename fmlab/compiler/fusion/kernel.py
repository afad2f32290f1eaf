"""A fused group as one operator of the graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.runner import Runner


class FusedKernel:
    """Several nodes that run as one. Called with the group's inputs, it gives the group's results as a tuple.

    Until `code` is set it runs the operators of `graph` one after another; then it calls what was generated,
    on the CPU, or on those devices that the code itself names.

    Attributes: graph: its nodes. space: (rows, columns). code: (inputs) -> results, from a code generator.
    overwrites: result -> the inputs whose memory it may take, for code that allows it.
    """

    pure = True

    def __init__(self, module: fx.GraphModule, space: tuple[int, int], number: int):
        self.module, self.space = module, space
        self.graph = module.graph
        self.members = [g.name(node) for node in g.calls(self.graph) if not g.is_view(node)]
        self.__name__ = f"fused_{number}_" + "_".join(self.members)[:60]
        self.code: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
        self.overwrites: dict[int, list[int]] = {}
        self._plain = Runner(module)

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if self.code is None or inputs[0].device.type not in getattr(self.code, "devices", ("cpu",)):
            return self._plain(list(inputs))
        return self.code(inputs)

    def fake(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Results without data."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        return tuple(torch.empty_like(g.value(node)) for node in output.args[0])

    def empty(self) -> list[Tensor]:
        """New memory for the results."""
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in self.fake()]

    def __repr__(self) -> str:
        return self.__name__


def kernels(graph: fx.Graph) -> list[FusedKernel]:
    """The fused groups of a graph, in order."""
    return [node.target for node in graph.nodes if isinstance(node.target, FusedKernel)]


def lift(nodes: Sequence[fx.Node], owner: Any) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A graph of its own for `nodes`; the nodes that it reads, and those of its nodes that others read."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside))
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    results = [node for node in results if isinstance(g.value(node), Tensor)]
    graph, copies = fx.Graph(), {}
    for source in inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta["val"] = g.value(source)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph), inputs, results
