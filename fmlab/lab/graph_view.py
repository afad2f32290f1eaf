"""A graph of any front end, as a picture and as text.

    view(torch.fx.symbolic_trace(model))         a torch.fx GraphModule or Graph
    view(torch.export.export(model, (x,)))       an exported program
    view(fmlab.compiler.capture(model, x))       our compiler's, before or after passes
    view(front_ends.see()["jax"])                what `fmlab.frontends` captured: XLA, TensorFlow, JAX
    view(text)                                   HLO, StableHLO, a lazy XLA graph, a jaxpr
    view(thing).svg, view(thing).text            the picture; the graph in its front end's own words

In the picture an operation is a box below what it reads. Inputs that one operation reads are counted in its
box; a chain of three or more operations, where each reads only the one before, is one box (collapse=False
draws each).
"""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fmlab.frontends import Graph, Node
from fmlab.lab.figures import PALETTE
from fmlab.lab.front_ends import kind_of
from fmlab.lab.graph_layout import Box, Route, arrange
from fmlab.lab.graph_readers import read

__all__ = ["GraphView", "view"]

MOST = 150  # boxes that are drawn
FEW = 4  # inputs that are drawn even where one operation reads them
CHAIN = 3  # operations from which on a chain becomes one box
LETTER, LINE = 6.9, 16.0  # pixels: of a letter's width, of a line's height
INPUT, OTHER, COLLECTIVE = "input", "element by element, other", "collective"
#: kinds of what `front_ends.KINDS`, which one block needs, does not know; words of the names
MORE = {
    "matrix product": ("attention", "convolution", "conv1d", "conv2d", "conv3d", "einsum", "baddbmm"),
    "reduction": ("sum", "amax", "amin", "argmax", "loss", "cross_entropy"),
    "shape": ("concat", "split", "chunk", "stack", "get_tuple_element"),
}
EXACTLY = {"dot": "matrix product", "t": "shape", "cat": "shape", "tuple": "shape"}
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective",
    "psum",
    "broadcast_tensor",
)
#: kind -> colour, width and dashes of a box's border: no kind is told by its colour alone
LOOKS = {
    "matrix product": (PALETTE[1], 2.6, ""),
    "reduction": (PALETTE[0], 1.6, ""),
    COLLECTIVE: (PALETTE[3], 2.6, "8 3"),
    OTHER: (PALETTE[2], 1.0, ""),
    "shape": ("#8a8a8a", 1.0, "4 3"),
    INPUT: ("#333333", 1.0, "1 3"),
}


def view(thing: Any, title: str = "", *, most: int = MOST, collapse: bool = True) -> "GraphView":
    """The graph of `thing`, to be shown: a GraphModule, a captured program, a text, … (fmlab.lab.graph_view).

    most: boxes that are drawn; what is beyond is counted. collapse: chains as one box.

    Raises ValueError for a thing that is no graph, with what to do to get one, and for an empty graph.
    """
    if most < 1:
        raise ValueError(f"most={most}: at least one box is drawn")
    name, text, graphs = read(thing)
    if not any(graph.counts for graph in graphs.values()):
        raise ValueError("this graph has no operation: there is nothing to show")
    for graph in graphs.values():
        names = {node.name for node in graph.nodes}
        if unknown := [name for node in graph.nodes for name in node.inputs if name not in names]:
            raise ValueError(f"a node reads {unknown[0]!r}, which is no node of this graph")
    return GraphView(title or name, graphs, text, most, collapse)


@dataclass(frozen=True)
class GraphView:
    """A graph to look at. graphs: by name, "" if there is one. text: in its front end's own words."""

    title: str
    graphs: dict[str, Graph]
    text: str
    most: int = MOST
    collapse: bool = True

    @property
    def summary(self) -> str:
        """The operations of each graph, counted by what they do."""
        return "\n".join(
            " ".join(filter(None, (name, counted(graph)))) for name, graph in self.graphs.items()
        )

    def __repr__(self) -> str:
        lines = self.text.splitlines()
        more = [f"… {len(lines) - 40} more lines in .text"] if len(lines) > 40 else []
        return "\n".join([f"{self.title}: {self.summary}", *lines[:40], *more])

    @cached_property
    def svg(self) -> str:
        """The picture; graphs one below the other."""
        pictures = [_picture(name, graph, self) for name, graph in self.graphs.items() if graph.counts]
        width, height = max(p[1] for p in pictures), sum(p[2] for p in pictures) + 44
        parts, y = [], 22.0
        for body, _, size in pictures:
            parts.append(f'<g transform="translate(0 {y:.0f})">{body}</g>')
            y += size
        width = max(width, 560.0)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="sans-serif" font-size="12">'
            f"<title>{html.escape(f'{self.title}: {self.summary}')}</title>"
            f'<rect width="100%" height="100%" fill="white"/>'
            f'<text x="8" y="16" font-weight="bold" fill="#1a1a1a">{html.escape(self.title)}</text>'
            f"{''.join(parts)}{_legend(height - 12)}</svg>"
        )

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        text = html.escape(self.text)
        return (
            f'<div style="max-height:560px;overflow:auto;border:1px solid #ddd">{self.svg}</div>'
            f"<details><summary>{html.escape(self.summary)}: as text</summary>"
            f'<pre style="max-height:400px;overflow:auto;font-size:12px">{text}</pre></details>'
        )


def counted(graph: Graph) -> str:
    """ "12 operations (4 matrix product, 8 shape), 3 inputs and constants" """
    kinds: Counter[str] = Counter()
    for op, times in graph.counts.items():
        kinds[sort_of(op)] += times
    parts = ", ".join(f"{kinds[kind]} {kind}" for kind in LOOKS if kinds[kind])
    rest = len(graph.nodes) - kinds.total()
    return f"{kinds.total()} operations ({parts}), {rest} inputs and constants"


def sort_of(op: str) -> str:
    """What an operation does: a key of LOOKS."""
    word = op.lower().replace("-", "_")
    if any(each in word for each in COLLECTIVES):
        return COLLECTIVE
    kind = EXACTLY.get(word) or kind_of(op)
    if kind in LOOKS:
        return kind
    return next((kind for kind, words in MORE.items() if any(each in word for each in words)), OTHER)


# ---- from nodes to boxes -------------------------------------------------------------------------------


def boxes(graph: Graph, collapse: bool = True) -> list[Box]:
    """The boxes of a graph, each behind those that it reads."""
    readers: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            readers[name].append(node.name)
    given = [node for node in graph.nodes if node.op not in graph.counts]
    few = len(given) <= FEW
    hidden = {node.name for node in given if len(readers[node.name]) < (1 if few else 2)}
    drawn = [node for node in graph.nodes if node.name not in hidden]
    chains = _chains(drawn, readers, hidden, set(graph.counts)) if collapse else [[node] for node in drawn]
    ends = {node.name: chain[-1].name for chain in chains for node in chain}
    made = [_box(chain, ends, hidden, set(graph.counts)) for chain in chains]
    return _sorted(made)


def _chains(
    nodes: Sequence[Node], readers: dict[str, list[str]], hidden: set[str], ops: set[str]
) -> list[list[Node]]:
    """Runs of CHAIN operations or more, each the only reader of the one before; the others alone.

    A matrix product and a collective stay alone: they are what a reader looks for.
    """
    chain_of: dict[str, list[Node]] = {}
    chains: list[list[Node]] = []
    for node in nodes:
        above = [name for name in dict.fromkeys(node.inputs) if name not in hidden]
        plain = node.op in ops and sort_of(node.op) not in ("matrix product", COLLECTIVE)
        chain = chain_of.get(above[0]) if len(above) == 1 and plain else None
        if chain is not None and chain[-1].name == above[0] and len(readers[above[0]]) == 1:
            chain.append(node)
        else:
            chain = [node]
            chains.append(chain)
        if plain:
            chain_of[node.name] = chain
    short = [chain for chain in chains if len(chain) < CHAIN]
    return [chain for chain in chains if len(chain) >= CHAIN] + [[node] for chain in short for node in chain]


def _box(chain: Sequence[Node], ends: dict[str, str], hidden: set[str], ops: set[str]) -> Box:
    inside = {node.name for node in chain}
    read = [name for node in chain for name in node.inputs if name not in inside]
    inputs = tuple(dict.fromkeys(ends[name] for name in read if name not in hidden))
    last = chain[-1]
    work = last.op in ops
    words = [_short(node.op) for node in chain]
    if not work:
        lines = [_short(last.name)]
    elif len(words) > 5:
        lines = [*words[:2], f"… {len(words) - 4} more", *words[-2:]]
    else:
        lines = words
    folded = len({name for name in read if name in hidden})
    notes = [] if last.shape is None else [f"{last.dtype}{list(last.shape)}"]
    notes += [f"+ {folded} input{'s' * (folded > 1)}"] if folded else []
    lines = [*lines, *(["  ".join(notes)] if notes else [])]
    kinds = Counter(sort_of(node.op) for node in chain)
    kind = next(kind for kind in LOOKS if kinds[kind]) if work else INPUT
    about = str(Graph(tuple(chain)))
    width = max(60.0, LETTER * max(map(len, lines)) + 18)
    return Box(last.name, tuple(lines), kind, about, inputs, width, LINE * len(lines) + 10, not work)


def _short(name: str, most: int = 28) -> str:
    """The end of a long name, which tells most."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _sorted(made: Sequence[Box]) -> list[Box]:
    """Each box behind those that it reads: a chain's end may stand behind its readers' place."""
    done: dict[str, Box] = {}
    waiting = {box.name: box for box in made}
    while waiting:
        ready = [box for box in waiting.values() if all(name in done for name in box.inputs)]
        assert ready, "a circle of boxes"
        for box in ready:
            done[box.name] = waiting.pop(box.name)
    return list(done.values())


# ---- from boxes to a picture ---------------------------------------------------------------------------


def _picture(name: str, graph: Graph, shown: GraphView) -> tuple[str, float, float]:
    """The picture of one graph, and its width and height in pixels."""
    all_boxes = boxes(graph, shown.collapse)
    drawn = all_boxes[: shown.most]
    names = {box.name for box in drawn}
    for box in drawn:
        box.inputs = tuple(given for given in box.inputs if given in names)
    routes, width, height = arrange(drawn)
    top = 26.0 if name else 8.0
    parts = [_line(route) for route in routes] + [_drawn(box) for box in drawn]
    body = f'<g transform="translate(8 {top:.0f})">{"".join(parts)}</g>'
    if name:
        heading = html.escape(f"{name}: {counted(graph)}")
        body = f'<text x="8" y="16" fill="#1a1a1a">{heading}</text>{body}'
    height += top + 12
    if left := len(all_boxes) - len(drawn):
        body += f'<text x="8" y="{height + 6:.0f}" fill="#1a1a1a">… and {left} more boxes: see .text</text>'
        height += 20
    return body, width + 16, height


def _line(route: Route) -> str:
    """An edge: curves from point to point, an arrow's head at its end."""
    (x, y), *rest = route
    path = [f"M{x:.1f} {y:.1f}"]
    for end_x, end_y in rest:
        middle = (y + end_y) / 2
        path.append(f"C{x:.1f} {middle:.1f} {end_x:.1f} {middle:.1f} {end_x:.1f} {end_y:.1f}")
        x, y = end_x, end_y
    head = f"M{x - 3.5:.1f} {y - 6:.1f}L{x:.1f} {y:.1f}L{x + 3.5:.1f} {y - 6:.1f}"
    return f'<path d="{"".join(path)}{head}" fill="none" stroke="#777777"/>'


def _drawn(box: Box) -> str:
    note = len(box.lines) > 1 and (box.lines[-1].startswith("+") or "[" in box.lines[-1])
    texts = []
    for number, line in enumerate(box.lines):
        ink = "#595959" if note and number == len(box.lines) - 1 else "#1a1a1a"
        y = box.y + LINE * (number + 1) - 1
        texts.append(
            f'<text x="{box.x:.1f}" y="{y:.1f}" text-anchor="middle" fill="{ink}">{html.escape(line)}</text>'
        )
    frame = _frame(box.kind, box.x - box.width / 2, box.y, box.width, box.height)
    return f"<g><title>{html.escape(box.about)}</title>{frame}{''.join(texts)}</g>"


def _frame(kind: str, x: float, y: float, width: float, height: float) -> str:
    colour, border, dashes = LOOKS[kind]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="white" '
        f'stroke="{colour}" stroke-width="{border}"{dashed}/>'
    )


def _legend(y: float) -> str:
    parts, x = [], 8.0
    for kind in LOOKS:
        parts.append(_frame(kind, x, y - 10, 14, 12))
        parts.append(f'<text x="{x + 20:.0f}" y="{y:.0f}" fill="#1a1a1a">{kind}</text>')
        x += 34 + LETTER * len(kind)
    return "".join(parts)
