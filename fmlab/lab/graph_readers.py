"""From whatever holds a graph to the one form of `fmlab.frontends.Graph`."""

from typing import Any

from torch import fx, nn

from fmlab.backends.xla_program import HLO
from fmlab.compiler import Compiled, Eager, Program
from fmlab.compiler import graph as g
from fmlab.frontends import Captured, Graph, in_jax, in_tensorflow, in_torch, texts
from fmlab.lab.front_ends import Seen

Found = tuple[str, str, dict[str, Graph]]


def read(thing: Any) -> Found:
    """Its name, its text in its own words, its graphs by name. Raises ValueError for what is none."""
    if isinstance(thing, Graph):
        return "graph", str(thing), {"": thing}
    if isinstance(thing, Captured | Seen):
        return thing.name, thing.text, {"": thing.graph}
    if isinstance(thing, Compiled):
        thing = thing.program
    if isinstance(thing, Program):
        graphs = {name: _of_compiler(graph) for name, graph in thing.graphs.items()}
        return "fmlab.compiler", str(thing), graphs
    if isinstance(thing, HLO):
        thing = thing.text
    if isinstance(thing, str):
        return _of_text(thing)
    if isinstance(thing, fx.GraphModule):
        return "torch.fx", thing.code.strip(), {"": _of_fx(thing.graph)}
    if isinstance(thing, fx.Graph):
        return "torch.fx", str(thing).strip(), {"": _of_fx(thing)}
    if type(thing).__module__.startswith("torch.export"):
        return "torch.export", str(thing).strip(), {"": _of_fx(thing.graph)}
    return _of_other(thing)


def _of_text(text: str) -> Found:
    graph = texts.read(text)
    return "text", text.strip(), {"": graph}


def _of_fx(graph: fx.Graph) -> Graph:
    return Graph.of(in_torch.nodes(graph))


def _of_compiler(graph: fx.Graph) -> Graph:
    """As of torch.fx, with the names that our compiler gives to operators and fused groups."""
    nodes = in_torch.nodes(graph)
    operators = {node.name: g.name(node) for node in g.calls(graph)}
    return Graph.of([{**node, "op": operators.get(node["name"], node["op"])} for node in nodes])


def _of_other(thing: Any) -> Found:
    """A TensorFlow function or graph, or a jaxpr: known by what they have, no package is imported."""
    graph = getattr(thing, "graph", thing)
    if hasattr(graph, "get_operations"):
        found = Graph.of(in_tensorflow.nodes(graph))
        return "tensorflow", str(found), {"": found}
    jaxpr = getattr(thing, "jaxpr", thing)
    if hasattr(jaxpr, "eqns"):
        return "jax", str(thing), {"": Graph.of(in_jax.nodes(jaxpr))}
    kind = type(thing).__name__
    legal = (
        "a torch.fx GraphModule or Graph, a torch.export program, a Program of fmlab.compiler, a capture of "
        "fmlab.frontends, a TensorFlow function, a jaxpr, or the text of one"
    )
    if isinstance(thing, Eager):
        raise ValueError(f"nothing was captured: {thing.why}")
    if isinstance(thing, nn.Module) or callable(thing):
        raise ValueError(
            f"{kind} is a function, not yet a graph: capture it first, with torch.export.export(...) or "
            f"fmlab.compiler.capture(...); what can be shown: {legal}"
        )
    raise ValueError(f"{kind} is no graph; what can be shown: {legal}")
