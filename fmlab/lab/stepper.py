"""A panel on collectives: which links carry what in each step, which one saturates, which algorithm when?"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fmlab.chips.host import host
from fmlab.chips.topology import Topology, fat_tree, ring, switch
from fmlab.collectives import Schedule, cost, machine, schedule
from fmlab.collectives.pricing import Price, link_loads, price_schedule
from fmlab.extras import require
from fmlab.lab.figures import LINES, PALETTE, figure
from fmlab.lab.panels import Panel, choices
from fmlab.lab.roofline import duration

Edge = tuple[Hashable, Hashable]
PAYLOADS = {"4 KB": 4e3, "64 KB": 64e3, "1 MB": 1e6, "16 MB": 16e6, "256 MB": 256e6, "4 GB": 4e9}
ALGORITHMS = (
    "ring",
    "bidirectional_ring",
    "halving_doubling",
    "double_tree",
    "torus",
    "hierarchical",
    "direct",
    "one_shot",
)
COLOURS, STYLES = (*PALETTE, "#7F7F7F"), (*LINES, ":")  # one for each algorithm
SEGMENTS = 4
BUSY, BUSIEST, IDLE = PALETTE[0], PALETTE[1], "#d0d0d0"


@dataclass(frozen=True)
class Scene:
    """A topology and where its nodes are drawn. `grid`: the shape that grid algorithms run on it in."""

    topology: Topology
    places: Mapping[Hashable, tuple[float, float]]
    grid: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.topology.chips)

    def plan(self, algorithm: str) -> Schedule:
        """The all-reduce of this algorithm on all chips."""
        hosts = len(self.topology.hosts)
        dims = {
            "torus": self.grid,
            "hierarchical": (hosts, self.n // hosts) if hosts > 1 else (2, self.n // 2),
        }
        segments = SEGMENTS if algorithm == "double_tree" else None
        return schedule("all_reduce", algorithm, self.n, dims=dims.get(algorithm), segments=segments)


@cache
def scenes() -> dict[str, Scene]:
    """The networks to choose from. Bandwidths are the chips' published ones, per direction."""
    hop = machine("a100").protocols[0].latency / 14  # of the 14 steps of its ring: no source gives NVSwitch's
    h100 = host("p5.48xlarge").topology(latency=hop)
    trn2 = host("trn2.48xlarge").topology()
    two = fat_tree(2, switch(4, 450e9, hop), 4 * 50e9, 15e-6)
    grid: dict[Any, Any] = {chip: (chip % 4, 3 - chip // 4) for chip in range(16)}
    return {
        "8 H100, NVSwitch": Scene(h100, {**_circle(8), "switch": (0, 0)}, (2, 4)),
        "16 Trn2, 4 x 4 torus": Scene(trn2, grid, (4, 4)),
        "2 hosts x 4 chips": Scene(two, _two_hosts(), (2, 4)),
        "ring of 8, 50 GB/s": Scene(ring(8, 50e9, 1e-6), _circle(8), (2, 4)),
    }


def _circle(n: int, x: float = 0.0, y: float = 0.0, radius: float = 1.0, first: int = 0) -> dict[Any, Any]:
    angles = [math.pi / 2 - 2 * math.pi * k / n for k in range(n)]
    return {first + k: (x + radius * math.cos(a), y + radius * math.sin(a)) for k, a in enumerate(angles)}


def _two_hosts() -> dict[Any, Any]:
    places: dict[Any, Any] = {"core": (0, -1.5)}
    for number, x in enumerate((-1.4, 1.4)):
        places |= _circle(4, x, 0, 0.8, 4 * number)
        places |= {f"switch/{number}": (x, 0), f"network{number}": (x * 0.62, -1.5)}
    return places


def draw_links(ax: Any, scene: Scene, loads: Mapping[Edge, float]) -> None:
    """Chips and links; a link that carries something is an arrow, the wider the longer it is busy."""
    seconds = {edge: load / scene.topology.links[edge].bandwidth for edge, load in loads.items()}
    most = max(seconds.values(), default=0.0)
    for a, b in scene.topology.links:
        if _far(scene, a, b):
            continue  # the wrap of a torus: only drawn when busy
        xs, ys = zip(scene.places[a], scene.places[b], strict=True)
        ax.plot(xs, ys, color=IDLE, linewidth=1, linestyle="-", zorder=1)
    arrow = require("lab", "matplotlib.patches").FancyArrowPatch
    for edge, busy in seconds.items():
        share = busy / most if most else 0.0
        style = {"color": BUSIEST if share > 0.999 else BUSY, "linewidth": 0.8 + 1.8 * share, "zorder": 2}
        style |= {"arrowstyle": "-|>", "mutation_scale": 9, "connectionstyle": "arc3,rad=0.13"}
        for start, end in _strokes(scene, *edge):
            ax.add_patch(arrow(start, end, shrinkA=8, shrinkB=8, **style))
    for node, (x, y) in scene.places.items():
        chip = isinstance(node, int)
        ax.plot(
            [x], [y], marker="o" if chip else "s", markersize=15 if chip else 9, color="#333333", zorder=3
        )
        text = str(node) if chip else ""
        ax.text(x, y, text, color="white", ha="center", va="center", fontsize=8.5, zorder=4)
    ax.set_aspect("equal")
    ax.margins(0.16)
    ax.axis("off")


def _strokes(scene: Scene, a: Hashable, b: Hashable) -> list[tuple[Any, Any]]:
    """From where to where a link is drawn: a wrap leaves the grid on one side and comes in on the other."""
    (x, y), (u, v) = scene.places[a], scene.places[b]
    if not _far(scene, a, b):
        return [((x, y), (u, v))]
    dx, dy = 0.75 * math.copysign(x != u, x - u), 0.75 * math.copysign(y != v, y - v)
    return [((x, y), (x + dx, y + dy)), ((u - dx, v - dy), (u, v))]


def _far(scene: Scene, a: Hashable, b: Hashable) -> bool:
    """Whether a link joins the two ends of an axis of a drawn grid."""
    (x, y), (u, v) = scene.places[a], scene.places[b]
    return len(scene.grid) == 2 and scene.n == 16 and abs(x - u) + abs(y - v) > 1.5


def _steps(network: str, algorithm: str, **_: Any) -> range:
    """The numbers of the steps that this algorithm takes on this network."""
    return range(1, len(scenes()[network].plan(algorithm).steps) + 1)


def _draw(network: str, algorithm: str, payload: str, step: int) -> tuple[Any, str]:
    scene, size = scenes()[network], PAYLOADS[payload]
    plan = scene.plan(algorithm)
    loads = link_loads(plan, scene.topology, int(size), plan.steps[step - 1])
    fig, (left, right) = figure(
        x=["", "payload"], y=["", "time of an all-reduce [µs]"], width=9.2, height=3.7,
        title=[f"Step {step} of {len(plan.steps)}", "Which algorithm, when?"],
    )  # fmt: skip
    draw_links(left, scene, loads)
    _curves(right, network, algorithm, size)
    whole = link_loads(plan, scene.topology, int(size))
    busy = {edge: load / scene.topology.links[edge].bandwidth for edge, load in whole.items()}
    edge = max(busy, key=lambda e: busy[e])
    equal = sum(seconds > 0.999 * busy[edge] for seconds in busy.values())
    prices = _prices(network)
    seconds = prices[algorithm].seconds(size)
    best = min(prices, key=lambda name: prices[name].seconds(size))
    return fig, (
        f"{network}, {algorithm}, {payload}: step {step} of {len(plan.steps)} uses {len(loads)} of "
        f"{len(scene.topology.links)} links; in all {duration(seconds)}, of which the busiest link, "
        f"{edge[0]} → {edge[1]}{f' ({equal} are alike)' if equal > 1 else ''}, sends for "
        f"{duration(busy[edge])}; fastest for this payload: {best}"
    )


def _curves(ax: Any, network: str, chosen: str, size: float) -> None:
    """Modelled time of each algorithm against payload, the chosen one marked."""
    payloads = [4e3 * 2**k for k in range(21)]
    for index, name in enumerate(ALGORITHMS):
        curve = _prices(network)[name]
        times = [curve.seconds(payload) * 1e6 for payload in payloads]
        look = {
            "color": COLOURS[index],
            "linestyle": STYLES[index],
            "linewidth": 3.5 if name == chosen else 1.3,
        }
        ax.plot(payloads, times, label=name, **look)
        if name == chosen:
            here = curve.seconds(size) * 1e6
            ax.plot([size], [here], marker="o", markersize=9, color=COLOURS[index], label="_here")
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(list(PAYLOADS.values()), list(PAYLOADS))
    ax.set_xticks([], minor=True)
    ax.legend(fontsize=8.5, ncols=1, loc="upper left")


@cache
def _prices(network: str) -> dict[str, Price]:
    scene = scenes()[network]
    return {name: price_schedule(scene.plan(name), scene.topology) for name in ALGORITHMS}


def stepper_panel() -> Panel:
    """A panel with sliders for network, algorithm, payload and step; all its figures are modelled.

    Worth finding: on a switch the ring's links are all alike; on a torus a ring leaves most of them idle;
    between hosts one link decides; and no algorithm is the fastest for every payload.
    """
    return Panel(
        "Which link saturates, and which algorithm is the fastest?",
        _draw,
        kind="modelled",
        network=choices("16 Trn2, 4 x 4 torus", list(scenes()), "network"),
        algorithm=choices("ring", ALGORITHMS, "algorithm of the all-reduce"),
        payload=choices("16 MB", list(PAYLOADS), "payload"),
        step=choices(1, _steps, "step"),
    )


def choice_table(scene: Scene, payloads: Mapping[str, float]) -> dict[str, list[Any]]:
    """Columns for a Table: of each payload the fastest algorithm and its modelled microseconds."""
    found = [cost.compare("all_reduce", size, scene.topology)[0] for size in payloads.values()]
    return {
        "payload": list(payloads),
        "fastest": [one.algorithm for one in found],
        "time": [one.seconds * 1e6 for one in found],
    }
