"""Overlap as a pass: send as early, and wait as late, as what depends on what allows.

A collective between its start and its wait costs the compute stream nothing, as long as there is something
else to compute. This pass moves nodes, and changes none.
"""

from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.distributed.collective import is_start, is_wait, start_of, waits
from fmlab.compiler.distributed.schedule import arrange, scheduled
from fmlab.compiler.memory.plan import plan_memory
from fmlab.compiler.passes.base import GraphPass, Report


class Overlap(GraphPass):
    """Reorders a graph so that collectives have independent work between their start and their wait.

    Computing earlier can mean keeping more alive. `live_bytes` bounds the peak of plan_memory: nodes are then
    moved ahead of as many others as fit, by halving that number until the peak does. Waits move for free.

    Raises ValueError, and leaves the graph as it is, for a bound below the peak of the graph as given.
    """

    name = "overlap"
    claims = (
        "the same nodes in another order: random operators keep theirs, and so do collectives, because all "
        "ranks must agree on it"
    )

    def __init__(self, live_bytes: int | None = None):
        self.live_bytes = live_bytes

    def apply(self, graph: fx.Graph, report: Report) -> None:
        if not any(is_start(node) for node in graph.nodes):
            return
        given = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        before = _work_around(graph)
        ahead = len(given)
        arrange(graph, scheduled(given, ahead))
        while self.live_bytes is not None and (peak := plan_memory(graph).peak) > self.live_bytes:
            if not ahead:
                arrange(graph, given)
                raise ValueError(
                    f"at least {peak:,} bytes are alive in this graph wherever its collectives stand, and "
                    f"the bound is {self.live_bytes:,}; give more, or recompute first"
                )
            ahead //= 2
            arrange(graph, scheduled(given, ahead))
        if ahead < len(given):
            report.refused.append(
                f"within {self.live_bytes:,} bytes, work moves ahead of {ahead} nodes at most"
            )
        after = _work_around(graph)
        report.made["start earlier"] += sum(after[wait][0] < before[wait][0] for wait in after)
        report.made["wait later"] += sum(after[wait][1] > before[wait][1] for wait in after)
        report.made = +report.made


def _work_around(graph: fx.Graph) -> dict[fx.Node, tuple[int, int]]:
    """wait -> how many computing nodes stand before the start, and between start and wait."""
    place, done = dict[fx.Node, int](), 0
    for node in graph.nodes:
        place[node] = done
        done += _computes(node)
    return {wait: (place[start_of(wait)], place[wait] - place[start_of(wait)]) for wait in waits(graph)}


def _computes(node: fx.Node) -> bool:
    communicates = is_start(node) or is_wait(node)
    return node.op == "call_function" and not communicates and not g.is_view(node)
