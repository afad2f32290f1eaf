"""An order for a graph's nodes: what a collective needs first, other work next, waits when nothing is left.

List scheduling: at each step, of the nodes whose inputs are there, the one with the best claim (Graham 1966,
Bell System Technical Journal 45, "Bounds for Certain Multiprocessing Anomalies").
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.capture import root
from fmlab.compiler.distributed.collective import is_start, is_wait, start_of


# region scheduled
def scheduled(nodes: Sequence[fx.Node], ahead: int) -> list[fx.Node]:
    """The same nodes in another order.

    Of those that can run: a start; what the next start needs; anything else; and a wait only if nothing else
    can run, the one that the first node in the given order needs. Ties go to the given order.

    ahead: how many nodes of the given order that are not done yet may be passed by another one; with 0 only
        waits move.
    """
    todo = _Todo(nodes)
    order: list[fx.Node] = []
    while todo.work or todo.waits:
        reach = todo.work[: ahead + 1]
        ready = [node for node in reach if todo.is_ready(node)]
        if ready:
            urgent = todo.needed_by_next_start()
            chosen = min(ready, key=lambda node: (not is_start(node), node not in urgent, todo.place[node]))
        else:
            needed = todo.needed_by(todo.work[0]) if todo.work else set(todo.waits)
            chosen = next(wait for wait in todo.waits if wait in needed and todo.is_ready(wait))
        todo.finish(chosen)
        order.append(chosen)
    return order


# endregion


class _Todo:
    """What is left to do. work: in the given order; waits: in the order of their starts."""

    def __init__(self, nodes: Sequence[fx.Node]):
        self.place = {node: i for i, node in enumerate(nodes)}
        self.before = _dependencies(nodes)
        self.missing = {node: len(sources) for node, sources in self.before.items()}
        self.after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, sources in self.before.items():
            for source in sources:
                self.after[source].append(node)
        self.work = [node for node in nodes if not is_wait(node)]
        self.waits = sorted(filter(is_wait, nodes), key=lambda wait: self.place[start_of(wait)])
        self.starts = [node for node in nodes if is_start(node)]
        self._urgent: set[fx.Node] | None = None

    def is_ready(self, node: fx.Node) -> bool:
        """Whether all that must come before it is done."""
        return not self.missing[node]

    def finish(self, node: fx.Node) -> None:
        """Take a node off the list."""
        (self.waits if is_wait(node) else self.work).remove(node)
        for user in self.after[node]:
            self.missing[user] -= 1
        del self.missing[node]
        if is_start(node):
            self.starts.remove(node)
            self._urgent = None

    def needed_by_next_start(self) -> set[fx.Node]:
        """What is left of the way to the next collective."""
        if self._urgent is None:
            self._urgent = self.needed_by(self.starts[0]) if self.starts else set()
        return self._urgent

    def needed_by(self, node: fx.Node) -> set[fx.Node]:
        """All that is left to do before `node`, and the node itself."""
        found, stack = set[fx.Node](), [node]
        while stack:
            one = stack.pop()
            if one in self.missing and one not in found:
                found.add(one)
                stack += self.before[one]
        return found


def _dependencies(nodes: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """What must come before each node: what it reads; for collectives and for random operators, the last one
    of their kind, so that these keep their order; and for one that overwrites memory, all who read that."""
    known = set(nodes)
    before = {node: {source for source in node.all_input_nodes if source in known} for node in nodes}
    last: dict[str, fx.Node] = {}
    for node in nodes:
        effect = node.op == "call_function" and not g.is_pure(node)
        kind = "collective" if is_start(node) else "effect" if effect else ""
        if kind and kind in last:
            before[node].add(last[kind])
        if kind:
            last[kind] = node
        for place in node.meta.get("overwrites", {}).values():
            before[node] |= _readers(root(node.args[place]), nodes) - {node}
    return before


def _readers(memory: fx.Node, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    return {node for node in nodes if any(root(source) is memory for source in node.all_input_nodes)}


def arrange(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Put the graph's nodes, other than inputs and output, into this order."""
    output = next(node for node in graph.nodes if node.op == "output")
    for node in order:
        output.prepend(node)
