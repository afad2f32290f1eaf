"""Ranks on their hosts, and what travels between them: which axis of a layout is on which link?

placement_view({"tensor first": (grid, bytes_by_link)}, per_host=2, text="...")
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fmlab.extras import require
from fmlab.lab.figures import PALETTE, Captioned, caption, figure
from fmlab.parallel.grid import AXES, Grid

Links = Mapping[tuple[int, int], int]
_COLOURS = dict(zip(("tensor", "data", "pipeline", "context"), PALETTE, strict=False))
_WIDEST, _APART = 9.0, 2.4  # points of the busiest line; how far hosts stand from each other


def placement_view(
    steps: Mapping[str, tuple[Grid, Links]],
    per_host: int,
    text: str,
    kind: str = "measured",
    smallest: float = 0.01,
) -> Captioned:
    """A picture for each entry of `steps`: title -> (grid, (from, to) -> bytes).

    Hosts stand beside each other, each with the ranks that have their numbers in a row, one above the other.
    A line is what two ranks send each other, both ways together: as wide as that is much, in the colour of
    the axis along which they are neighbours. Lines below `smallest` of the widest are left out.
    Raises ValueError for ranks that do not fill whole hosts.
    """
    both = {title: _both_ways(links) for title, (_, links) in steps.items()}
    most = max((size for pairs in both.values() for size in pairs.values()), default=0)
    fig, axes = figure(x="", y="", title=list(steps), height=2.7)
    numbers: dict[str, Any] = {}
    for ax, (title, (grid, _)) in zip(axes if len(steps) > 1 else [axes], steps.items(), strict=True):
        if grid.world_size % per_host:
            raise ValueError(f"{grid.world_size} ranks do not fill hosts of {per_host}: give a divisor")
        shown = {pair: size for pair, size in both[title].items() if size >= smallest * most}
        _draw(ax, grid, shown, per_host, most)
        for (a, b), size in shown.items():
            where = "inside a host" if a // per_host == b // per_host else "between hosts"
            numbers[f"{title}, ranks {a} and {b}, {axis_between(grid, a, b)}, {where} [MB]"] = size / 1e6
    return caption(fig, kind=kind, text=text, numbers=numbers)


def axis_between(grid: Grid, a: int, b: int) -> str:
    """The axis along which two ranks are neighbours; "several" if they differ in more than one."""
    here, there = grid.coordinates(a), grid.coordinates(b)
    differ = [axis for axis in AXES if here[axis] != there[axis]]
    return differ[0] if len(differ) == 1 else "several"


def _both_ways(links: Links) -> dict[tuple[int, int], int]:
    pairs: defaultdict[tuple[int, int], int] = defaultdict(int)
    for (a, b), size in links.items():
        pairs[min(a, b), max(a, b)] += size
    return dict(sorted(pairs.items()))


def _draw(ax: Any, grid: Grid, pairs: Mapping[tuple[int, int], int], per_host: int, most: int) -> None:
    patches = require("lab", "matplotlib.patches")
    at = {rank: (rank // per_host * _APART, -(rank % per_host)) for rank in range(grid.world_size)}
    for host in range(grid.world_size // per_host):
        corner = (host * _APART - 0.45, -per_host + 0.55)
        box = patches.FancyBboxPatch(
            corner, 0.9, per_host - 0.1, boxstyle="round,pad=0.12", fc="#f2f2f2", ec="#888888", zorder=0
        )
        ax.add_patch(box)
        ax.text(host * _APART, 0.72, f"host {host}", ha="center", fontsize=9.5, color="#444444")
    named = set()
    for (a, b), size in pairs.items():
        axis = axis_between(grid, a, b)
        colour = _COLOURS.get(axis, "#999999")
        (x0, y0), (x1, y1) = at[a], at[b]
        label = f"_{axis}" if axis in named else f"{axis} axis"
        named.add(axis)
        width = max(_WIDEST * size / most, 1.0)
        ax.plot([x0, x1], [y0, y1], color=colour, linestyle="-", linewidth=width, label=label, zorder=1)
        note = dict(fontsize=9, ha="center", va="center", zorder=3)
        background = dict(boxstyle="round,pad=0.15", fc="white", ec=colour, lw=0.8)
        ax.text((x0 + x1) / 2, (y0 + y1) / 2, f"{size / 1e6:.1f} MB", bbox=background, **note)
    for rank, (x, y) in at.items():
        ax.plot([x], [y], "o", color="#333333", markersize=17, zorder=2, label="_rank")
        ax.text(x, y, str(rank), color="white", ha="center", va="center", fontsize=10, zorder=4)
    right = (grid.world_size // per_host - 1) * _APART
    ax.set(xlim=(-0.9, right + 0.9), ylim=(-per_host + 0.2, 1.05))
    ax.set_axis_off()
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=9)
