"""A fused group writes a result to the memory of an input that nobody reads afterwards."""

from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.fusion.kernel import FusedKernel
from fmlab.compiler.memory.plan import Storage, handed, held, lifetimes
from fmlab.compiler.passes.base import GraphPass, Report


class InPlace(GraphPass):
    """Lets generated groups overwrite what they read last: one tensor less is alive, and less memory moves
    through the caches. Run it last, since it holds for the order that the graph has then.

    Only memory that the graph itself made and that no view, no other input of the group and no result of the
    graph still needs. `node.meta["overwrites"]` has result -> input; Runner and plan_memory follow it.
    """

    name = "in place"
    claims = "the same numbers, in other memory"

    def apply(self, graph: fx.Graph, report: Report) -> None:
        for node, pairs in allowed(list(graph.nodes)).items():
            node.meta["overwrites"] = pairs
            report.made["result in place"] += len(pairs)


def allowed(nodes: list[fx.Node]) -> dict[fx.Node, dict[int, int]]:
    """For each group: result -> the input whose memory it may take."""
    where = held(nodes, merged=False)
    deaths = {storage: life.death for storage, life in lifetimes(nodes, merged=False).items()}
    kept = handed(nodes, merged=False)
    found: dict[fx.Node, dict[int, int]] = {}
    for step, node in enumerate(nodes):
        if not isinstance(node.target, FusedKernel) or node.target.code is None:
            continue
        pairs: dict[int, int] = {}
        for result, sources in node.target.overwrites.items():
            for k in sources:
                source = node.args[k]
                assert isinstance(source, fx.Node)
                (storage,) = where[source]
                free = deaths.get(storage) == step and storage not in kept and k not in pairs.values()
                alone = sum(where[other] == [storage] for other in node.all_input_nodes) == 1
                if free and alone and _whole(source, storage):
                    pairs[result] = k
                    break
        if pairs:
            found[node] = pairs
    return found


def check(nodes: list[fx.Node]) -> None:
    """Raise ValueError if a graph was changed after InPlace so that a group overwrites what is still read."""
    if not any(node.meta.get("overwrites") for node in nodes):
        return
    now = allowed(nodes)
    for node in nodes:
        if (planned := node.meta.get("overwrites", {})).items() - now.get(node, {}).items():
            raise ValueError(
                f"{node.name} overwrites inputs {sorted(planned.values())}, one of which is still read: the "
                "graph was changed after InPlace; run InPlace last"
            )


def _whole(source: fx.Node, storage: Storage) -> bool:
    """Whether a node shows all of the memory that it lies in."""
    owner, index = storage
    made = g.value(owner)
    x = made[index] if isinstance(made, tuple | list) else made
    assert isinstance(x, Tensor)
    return x.untyped_storage().nbytes() == g.nbytes(source)
