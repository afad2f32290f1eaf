"""A model of when things happen: a graph on one compute stream and one communication stream.

Modelled, not measured: each node takes its operations divided by a rate, or its bytes divided by a bandwidth
if that is longer; each collective a latency and its bytes divided by a bandwidth, one after the other.
"""

import math
import operator
from dataclasses import dataclass, field

from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.distributed.collective import is_start, is_wait, start_of
from fmlab.compiler.fusion import FusedKernel
from fmlab.compiler.memory.recompute import operations


@dataclass(frozen=True)
class Span:
    """What a stream does from `begin` to `end`, in seconds. stream: "compute", "communication", or "exposed"
    where the compute stream stands still because a collective is not done."""

    name: str
    stream: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class OverlapTimeline:
    """Modelled seconds of a graph. spans: in the order of the graph, those of no length left out."""

    spans: list[Span] = field(default_factory=list)

    def seconds_of(self, stream: str) -> float:
        """How long a stream is busy."""
        return math.fsum(span.seconds for span in self.spans if span.stream == stream)

    @property
    def compute(self) -> float:
        """Seconds of computing."""
        return self.seconds_of("compute")

    @property
    def communication(self) -> float:
        """Seconds of communicating: what would be exposed if every start were followed by its wait."""
        return self.seconds_of("communication")

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed because a collective is not done."""
        return self.seconds_of("exposed")

    @property
    def seconds(self) -> float:
        """From the first node to the last."""
        return max((span.end for span in self.spans), default=0.0)

    def __str__(self) -> str:
        count = sum(span.stream == "communication" for span in self.spans)
        times = f"collective{'s' * (count != 1)}, of which {_time(self.exposed)} exposed"
        return (
            f"modelled: {_time(self.seconds)}; compute {_time(self.compute)}, communication "
            f"{_time(self.communication)} in {count} {times}"
        )

    def lanes(self, width: int = 72) -> str:
        """Two lines of text, one for each stream: # busy, . idle."""
        lines = []
        for stream in ("compute", "communication"):
            cells = ["."] * width
            for span in self.spans:
                if span.stream == stream:
                    first = int(span.begin / self.seconds * width)
                    last = math.ceil(span.end / self.seconds * width)
                    cells[first:last] = "#" * (min(last, width) - first)
            lines.append(f"{stream:14}{''.join(cells)}")
        return "\n".join(lines)


# region overlap_timeline
def overlap_timeline(
    graph: fx.Graph,
    flops_rate: float,
    bandwidth: float,
    latency: float,
    memory_bandwidth: float | None = None,
) -> OverlapTimeline:
    """When each node of a graph begins and ends, its order kept. All times are modelled.

    The compute stream takes the nodes in order; a start hands its collective to the other stream and goes on,
    a wait stands still until it is done. Call it before and after `Overlap` to see what that hides.

    Args:
        flops_rate: operations a second, a multiply-add counted as 2 (see fmlab.compiler.memory).
        bandwidth: bytes of payload that all ranks have summed in a second. For a ring of n ranks: what a rank
            sends in a second, divided by 2 (n - 1) / n.
        latency: seconds that each collective takes beside that.
        memory_bandwidth: bytes that operators read and write in a second; None for no limit.

    Raises ValueError for rates that are not above 0, and a latency below 0.
    """
    _check(flops_rate, bandwidth, latency, memory_bandwidth)
    line, now, free = OverlapTimeline(), 0.0, 0.0
    done: dict[fx.Node, float] = {}
    for node in g.calls(graph):
        if is_start(node):
            begin = max(now, free)
            done[node] = free = begin + latency + g.nbytes(node) / bandwidth
            line.spans.append(Span(node.name, "communication", begin, free))
        elif is_wait(node):
            ready = max(now, done[start_of(node)])
            if ready > now:
                line.spans.append(Span(node.name, "exposed", now, ready))
            now = ready
        elif seconds := _compute_seconds(node, flops_rate, memory_bandwidth):
            line.spans.append(Span(node.name, "compute", now, now + seconds))
            now += seconds
    return line


# endregion


def _check(flops_rate: float, bandwidth: float, latency: float, memory_bandwidth: float | None) -> None:
    rates = dict(flops_rate=flops_rate, bandwidth=bandwidth, memory_bandwidth=memory_bandwidth)
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            raise ValueError(f"{name} is {rate}; legal: a number a second, above 0")
    if not latency >= 0:
        raise ValueError(f"latency is {latency}; legal: seconds, 0 or more")


def _compute_seconds(node: fx.Node, flops_rate: float, memory_bandwidth: float | None) -> float:
    if g.is_view(node):
        return 0.0
    moved = g.nbytes(node) + sum(map(g.nbytes, node.all_input_nodes))
    return max(_operations(node) / flops_rate, moved / memory_bandwidth if memory_bandwidth else 0.0)


def _operations(node: fx.Node) -> int:
    """As for memory, but a fused group's are those of the nodes in it."""
    if not isinstance(node.target, FusedKernel):
        return operations(node)
    return sum(operations(one) for one in node.target.graph.nodes if one.target is not operator.getitem)


def _time(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:.3g} {unit}"
