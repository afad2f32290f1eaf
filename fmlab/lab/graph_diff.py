"""The graph-pass diff: which nodes did a pass take away, which did it put there, and how many bytes is that?

steps = changes(model, x)            each pass over each graph, one Change for each, in order
show_change(steps[0])                before and after side by side, as a figure
graph_diff_panel()                   the same with sliders for model, pass and graph
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from torch import fx

from fmlab.compiler import Fusion, JoinSlices, Pass, PassManager, Report, SplitBias, capture, default_passes
from fmlab.compiler import graph as g
from fmlab.compiler.capture import Program
from fmlab.compiler.codegen.generate import code, lower
from fmlab.compiler.flat import Flat
from fmlab.compiler.fusion import FusedKernel
from fmlab.compiler.source import export
from fmlab.lab.figures import DPI, PALETTE, Captioned, caption, style
from fmlab.lab.panels import Panel, choices
from fmlab.lab.table import number
from fmlab.lab.written import MODELS, given

#: What an operator does, and words of its name.
KINDS = {
    "matrix product": ("mm", "matmul", "linear", "convolution"),
    "attention": ("attention",),
    "norm, softmax, sum": ("norm", "softmax", "sum", "mean", "amax", "var"),
    "copy, fill": ("clone", "copy", "cat", "full", "arange", "contiguous", "embedding", "scatter", "select"),
}
VIEW, FUSED, OTHER = "view", "fused", "element by element"
MOST_ROWS = 30  # of a picture; what is beyond is counted
GONE, NEW, SAME = PALETTE[1], PALETTE[0], "#bbbbbb"


@dataclass(frozen=True)
class Operation:
    """A node of a graph that does something. moved: bytes read and written; 0 for a view. stays: is it in
    the graph before and after the pass?"""

    name: str
    op: str
    kind: str
    shape: str
    moved: int
    stays: bool


@dataclass(frozen=True)
class Change:
    """What one pass did to one graph ("source", "forward" or "backward")."""

    made_by: str
    graph: str
    before: tuple[Operation, ...]
    after: tuple[Operation, ...]
    report: Report

    @property
    def vanished(self) -> list[Operation]:
        return [one for one in self.before if not one.stays]

    @property
    def new(self) -> list[Operation]:
        return [one for one in self.after if not one.stays]

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Nodes of each kind, before and after."""
        sides = [Counter(one.kind for one in side) for side in (self.before, self.after)]
        order = [*KINDS, OTHER, FUSED, VIEW]
        return {kind: (sides[0][kind], sides[1][kind]) for kind in order if sides[0][kind] or sides[1][kind]}

    def __str__(self) -> str:
        changed = [f"{kind} {a} -> {b}" for kind, (a, b) in self.kinds().items() if a != b]
        nodes = f"{len(self.before)} -> {len(self.after)} nodes" + (
            f" ({', '.join(changed)})" if changed else ""
        )
        a, b = self.report.bytes_before, self.report.bytes_after
        share = f" ({b / a - 1:+.0%})" if a and a != b else ""
        what = (
            f"nodes gone {len(self.vanished)}, new {len(self.new)}"
            if self.report.changed
            else "nothing to do"
        )
        alone = dict.fromkeys(self.report.refused)
        left = f"; {len(alone)} left alone, such as {next(iter(alone))}" if alone else ""
        return (
            f"{self.made_by}, {self.graph} graph: {what}; {nodes}; {size(a)} -> {size(b)} read and "
            f"written{share}{left}"
        )


def size(nbytes: float) -> str:
    """Bytes for a reader: "512 B", "131 kB", "2.1 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{number(nbytes / factor)} {unit}"
    return f"{int(nbytes)} B"


def kind_of(node: fx.Node) -> str:
    """What a node does: one of KINDS, a view, a fused group, or work element by element."""
    if isinstance(node.target, FusedKernel):
        return FUSED
    if g.is_view(node):
        return VIEW
    name = g.name(node)
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), OTHER)


# ---- changes -----------------------------------------------------------------------------------------------


def passes_in_order() -> list[Pass]:
    """The passes that are stepped through: those of fmlab.compiler, up to fusion."""
    return [*default_passes(), JoinSlices(), SplitBias(), Fusion()]


def changes(
    fn: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    passes: Iterable[Pass] | None = None,
    backward: bool = True,
) -> list[Change]:
    """Every pass over every graph of `fn(*inputs, **kwargs)`, in order: first those on the source, before it
    is differentiated, then each on the forward and the backward graph.

    passes: passes_in_order() if not given. Raises CaptureError (a ValueError) for what a graph cannot hold.
    """
    manager = PassManager(passes_in_order() if passes is None else passes)
    program = capture(fn, *inputs, kwargs=kwargs, backward=backward, rewrites=manager.source)
    assert isinstance(program, Program)
    found = []
    if not program.notes:  # else the source was not rewritten, and the notes say why
        module, _ = export(Flat(fn, inputs, kwargs or {}), inputs, kwargs or {})
        found += [_change("source", module.graph, each) for each in manager.source]
    for each in manager.passes:
        if not each.source:
            found += [_change(name, graph, each) for name, graph in program.graphs.items()]
    return found


def _change(name: str, graph: fx.Graph, each: Pass) -> Change:
    before = {node: _operation(node) for node in g.calls(graph)}
    report = each.run(graph)
    after = {node: _operation(node) for node in g.calls(graph)}
    sides = [
        tuple(Operation(*made, stays=node in other) for node, made in side.items())
        for side, other in ((before, after), (after, before))
    ]
    return Change(each.name, name, sides[0], sides[1], report)


def _operation(node: fx.Node) -> tuple[str, str, str, str, int]:
    moved = 0 if g.is_view(node) else g.nbytes(node) + sum(map(g.nbytes, node.all_input_nodes))
    op = "fused: " + ", ".join(node.target.members) if isinstance(node.target, FusedKernel) else g.name(node)
    tensors = g.tensors(node)
    shape = "x".join(map(str, tensors[0].shape)) if tensors else ""
    return node.name, op, kind_of(node), shape, moved


# ---- picture -----------------------------------------------------------------------------------------------

#: One line of the picture: an operation on each side, or how many stay, or how many there is no room for.
Line = tuple[Operation | str | None, Operation | str | None]


def lines(change: Change, most: int = MOST_ROWS) -> list[Line]:
    """The two graphs beside one another, in order; what stays between two changes is one line.

    Views are left out, unless nothing else changed.
    """
    before, after = change.before, change.after
    if any(one.kind != VIEW for one in (*change.vanished, *change.new)):
        before, after = (tuple(o for o in side if o.kind != VIEW) for side in (before, after))
    matcher = SequenceMatcher(None, [o.name for o in before], [o.name for o in after], autojunk=False)
    found: list[Line] = []
    for what, a, b, c, d in matcher.get_opcodes():
        left, right = before[a:b], after[c:d]
        if what == "equal":
            count = f"… {len(left)} stay …" if len(left) > 1 else None
            found.append((count, count) if count else (left[0], right[0]))
            continue
        rows = max(len(left), len(right))
        found += zip(_padded(left, rows), _padded(right, rows), strict=True)
    if len(found) > most:
        more = f"… {len(found) - most + 1} more lines …"
        found = [*found[: most - 1], (more, more)]
    return found


def _padded(side: Sequence[Operation], rows: int) -> list[Operation | None]:
    return [*side, *[None] * (rows - len(side))]


def draw(change: Change, most: int = MOST_ROWS) -> Any:
    """A figure: the lines, the bytes of both graphs, and their nodes by kind."""
    from matplotlib.figure import Figure

    shown = lines(change, most)
    listing = 0.19 * (len(shown) + 1.6)
    with style():
        fig = Figure(figsize=(7.8, listing + 1.9), dpi=DPI)
        grid = fig.add_gridspec(2, 2, height_ratios=[listing, 1.9])
        text, moved, kinds = (fig.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
    _draw_lines(text, shown)
    _draw_bytes(moved, change)
    _draw_kinds(kinds, change)
    return fig


def _draw_lines(ax: Any, shown: Sequence[Line]) -> None:
    ax.axis("off")
    ax.set(xlim=(0, 2), ylim=(len(shown) - 0.4, -1.6))
    for x, title in ((0.0, "before"), (1.02, "after")):
        ax.text(x + 0.01, -1, title, weight="bold", va="center", fontsize=9.5)
    for y, sides in enumerate(shown):
        for x, one, sign, colour in ((0.0, sides[0], "\N{MINUS SIGN}", GONE), (1.02, sides[1], "+", NEW)):
            if isinstance(one, str):
                ax.text(x + 0.06, y, one, va="center", fontsize=8, color="#666666", style="italic")
            elif one is not None:
                _draw_operation(ax, x, y, one, sign, colour)


def _draw_operation(ax: Any, x: float, y: float, one: Operation, sign: str, colour: str) -> None:
    ink = "#555555" if one.stays else "black"
    if not one.stays:
        ax.barh(y, 0.98, left=x, height=0.86, color=colour, alpha=0.2)
        ax.text(x + 0.02, y, sign, va="center", fontsize=9, weight="bold", color=colour)
    op = one.op if len(one.op) <= 28 else one.op[:27] + "…"
    ax.text(x + 0.06, y, op, va="center", fontsize=8, color=ink)
    ax.text(x + 0.78, y, one.shape, va="center", ha="right", fontsize=7.5, color=ink)
    moved = size(one.moved) if one.moved else "view" if one.kind == VIEW else "0 B"
    ax.text(x + 0.97, y, moved, va="center", ha="right", fontsize=8, color=ink)


def _draw_bytes(ax: Any, change: Change) -> None:
    for y, (side, colour, hatch) in enumerate(((change.before, GONE, "////"), (change.after, NEW, ""))):
        left = 0.0
        for stays in (True, False):
            width = sum(one.moved for one in side if one.stays == stays) / 1e6
            look = {"color": SAME} if stays else {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}
            ax.barh(y, width, left=left, height=0.7, **look)
            left += width
    ax.set(xlabel="read and written [MB]", ylabel="")
    ax.set_yticks([0, 1], ["before", "after"])
    ax.set_ylabel("graph")
    ax.invert_yaxis()


def _draw_kinds(ax: Any, change: Change) -> None:
    counts = change.kinds()
    for y, (before, after) in enumerate(counts.values()):
        ax.barh(y - 0.2, before, height=0.36, color=GONE if before != after else SAME, alpha=0.75)
        ax.barh(y + 0.2, after, height=0.36, color=NEW if before != after else SAME, alpha=0.75)
    ax.set(xlabel="before and after [nodes]", ylabel="kind")
    ax.set_yticks(range(len(counts)), list(counts), fontsize=8)
    ax.invert_yaxis()


def show_change(change: Change, text: str = "", most: int = MOST_ROWS) -> Captioned:
    """The picture of one change with its caption; its numbers are nodes and bytes before and after."""
    report = change.report
    numbers = {
        "nodes": [len(change.before), len(change.after)],
        "vanished, new": [len(change.vanished), len(change.new)],
        "read and written [B]": [report.bytes_before, report.bytes_after],
    }
    return caption(draw(change, most), kind="measured", text=text or f"{change}.", numbers=numbers)


def cpp(kernel: FusedKernel) -> str:
    """The C++ that is generated for a fused group, as the function `fused`, indented by its braces."""
    text = code(lower(kernel), *kernel.space).replace(" NAME(", " fused(")
    depth, shown = 0, []
    for line in text.splitlines():
        depth -= line.startswith("}")
        shown.append("  " * (0 if line.startswith("#") else depth) + line)
        depth += line.endswith("{")
    return "\n".join(shown)


# ---- panel -------------------------------------------------------------------------------------------------


def _steps() -> list[str]:
    return [f"{place} {each.name}" for place, each in enumerate(passes_in_order(), 1)]


@cache
def _changes_of(model: str) -> dict[tuple[str, str], Change]:
    """By step and graph; a pass on the source stands for both graphs."""
    module, inputs = given(model)
    found = iter(changes(module, kwargs=inputs))
    table = {}
    for step, each in zip(_steps(), passes_in_order(), strict=True):
        for graph in ("forward", "backward"):
            if not each.source:
                table[step, graph] = next(found)
            elif graph == "forward":
                table[step, "forward"] = table[step, "backward"] = next(found)
    return table


def _draw(model: str, step: str, graph: str) -> tuple[Any, str]:
    change = _changes_of(model)[step, graph]
    return draw(change), f"{model}: {change}"


def graph_diff_panel(
    model: str = "GPT layer, written out", step: str = "1 attention", graph: str = "forward"
) -> Panel:
    """A panel with sliders for model, pass and graph: nodes that vanish (-) and come (+), and their bytes.

    Each step starts from what those before it left. Passes on the source work before differentiation, so that
    they are the same for both graphs. Bytes are those that operators are given and give, counted on shapes.
    """
    return Panel(
        "Which nodes and bytes vanish?",
        _draw,
        kind="measured",
        model=choices(model, list(MODELS), "model"),
        step=choices(step, _steps(), "pass"),
        graph=choices(graph, ("forward", "backward"), "graph"),
    )
