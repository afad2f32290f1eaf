"""What a pass is, what it reports, and the tools that all passes use to change a graph."""

import difflib
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from fmlab.compiler import graph as g


@dataclass
class Report:
    """What a pass did to a graph.

    before, after: how many nodes of each operator. bytes_before, bytes_after: read and written by all
    operators (`graph.moved_bytes`). made: rewrites by name. refused: why what looked alike was left alone.
    """

    name: str
    before: Counter[str]
    after: Counter[str]
    bytes_before: int
    bytes_after: int
    text_before: str
    text_after: str
    made: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether the graph is another one now."""
        return self.text_before != self.text_after

    @property
    def diff(self) -> str:
        """Lines of the graph that went (-) and came (+)."""
        lines = difflib.unified_diff(
            self.text_before.splitlines(), self.text_after.splitlines(), lineterm="", n=0
        )
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def __str__(self) -> str:
        nodes = f"{self.before.total()} -> {self.after.total()} nodes"
        moved = f"{self.bytes_before:,} -> {self.bytes_after:,} bytes read and written"
        made = ", ".join(f"{count}x {what}" for what, count in self.made.items()) or "nothing to do"
        refused = "".join(f"\n  left alone: {why}" for why in dict.fromkeys(self.refused))
        return f"{self.name}: {made}; {nodes}, {moved}{refused}"


class Pass(Protocol):
    """A change of a graph that keeps its results.

    name: short. claims: what it changes, and under which conditions results stay the same. source: True for
    passes that rewrite the function before it is differentiated, False for those on the two graphs after.
    """

    name: str
    claims: str
    source: bool

    def run(self, graph: fx.Graph) -> Report:
        """Change `graph` in place."""
        ...


class GraphPass:
    """A pass given by `apply`, which notes in the report what it makes and refuses."""

    name = ""
    claims = ""
    source = False

    def run(self, graph: fx.Graph) -> Report:
        text, before, moved = g.text(graph), g.counts(graph), g.moved_bytes(graph)
        report = Report(self.name, before, before, moved, moved, text, text)
        self.apply(graph, report)
        graph.lint()
        report.after, report.bytes_after, report.text_after = (
            g.counts(graph),
            g.moved_bytes(graph),
            g.text(graph),
        )
        return report

    def apply(self, graph: fx.Graph, report: Report) -> None:
        raise NotImplementedError


def insert(before: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A new call in front of a node, with the shape and dtype of its result."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.stack_trace = before.stack_trace  # the user's line that it stands for
    propagate(node)
    return node


def propagate(node: fx.Node) -> None:
    """Work out the shape and dtype of a node's result by running it without data."""
    args = pytree.tree_map_only(fx.Node, g.value, node.args)
    kwargs = pytree.tree_map_only(fx.Node, g.value, node.kwargs)
    mode = detect_fake_mode((args, kwargs)) or _mode_of(node.graph)
    run = getattr(node.target, "fake", node.target)
    assert callable(run)
    with mode:
        node.meta["val"] = run(*args, **kwargs)


def _mode_of(graph: fx.Graph) -> Any:
    mode = detect_fake_mode([x for node in graph.nodes for x in g.tensors(node)])
    assert mode is not None, "a graph without shapes"
    return mode


def replace(node: fx.Node, new: fx.Node) -> None:
    """Let `new` be read wherever `node` was, and drop `node`."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def drop_unread(graph: fx.Graph) -> int:
    """Remove pure nodes that nobody reads, and how many they were; inputs stay."""
    gone = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and g.is_pure(node):
            graph.erase_node(node)
            gone += node.target is not operator.getitem and node.op == "call_function"
    return gone


def same_kind(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes give tensors of one shape, dtype and device."""
    x, y = g.value(a), g.value(b)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return False
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def escaping(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory the caller gets: results, and what results are views of."""
    found: set[fx.Node] = set()
    outputs = pytree.tree_leaves(next(n for n in graph.nodes if n.op == "output").args[0])
    module = graph.owning_module
    results = module.meta.get("results") if module is not None else None
    for node in outputs[:results]:
        while isinstance(node, fx.Node):
            found.add(node)
            node = node.args[0] if g.is_view(node) else None
    return found
