"""What chapter 1.12 shows: one block as five front ends see it, in one table and one picture.

torch_xla, TensorFlow and JAX run in processes of .venv-xla and .venv-frontends where those are there;
elsewhere the committed captures stand in, made by `python -m fmlab.lab.front_ends`.
"""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fmlab import frontends
from fmlab.frontends import IN_A_PROCESS, NAMES, Graph, in_torch
from fmlab.frontends.spec import Arrays, batch, weights
from fmlab.lab.curriculum import environment_python
from fmlab.lab.figures import PALETTE, Captioned, caption, style

__all__ = ["KINDS", "Seen", "draw", "error_of_step", "kind_of", "kinds", "placed_loss", "see"]

COMMITTED = Path(__file__).with_name("front_ends.json")
COMMAND = "python -m fmlab.lab.front_ends"
ENVIRONMENTS = {"xla": ".venv-xla", "tensorflow": ".venv-frontends", "jax": ".venv-frontends"}

#: What an operation does, and words of its name, in all five languages.
KINDS = {
    "matrix product": ("linear", "matmul", "mm", "addmm", "dot_general"),
    "reduction": ("norm", "softmax", "mean", "reduce", "moments", "squareddifference"),
    "shape": (
        *("view", "reshape", "transpose", "permute", "expand", "broadcast", "squeeze", "slice", "getitem"),
        *("unbind", "flatten", "pack", "stopgradient", "stop_gradient", "convert_element_type", "getattr"),
    ),
}
_OTHER = "element by element"


@dataclass(frozen=True)
class Seen:
    """A captured block and what became of it.

    output_error, step_error: largest difference from one device in PyTorch, of the output, and of a weight
    behind the step on two devices as a share of the largest change of that weight (None: ranks run it).
    collectives: operations of the step's program that talk to the other device.
    """

    name: str
    versions: dict[str, str]
    graph: Graph
    text: str
    output_error: float
    step_error: float | None
    collectives: int | None
    source: str


def see(names: tuple[str, ...] = NAMES, committed: bool = False) -> dict[str, Seen]:
    """Every front end's view; those in other environments at the same time.

    committed: take the stored captures even where the environments are there.
    """
    stored = {} if not COMMITTED.exists() else json.loads(COMMITTED.read_text())

    def one(name: str) -> Seen:
        if name not in IN_A_PROCESS:
            return _judged(frontends.capture(name))
        python = None if committed else environment_python(ENVIRONMENTS[name])
        if python is None:
            found = dict(stored[name])
            return Seen(**{**found, "graph": Graph.of(found["graph"]), "source": f"committed, by {COMMAND}"})
        return _judged(frontends.capture(name, python))

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _judged(captured: frontends.Captured) -> Seen:
    output, _ = in_torch.on_one_device()
    talks = frontends.collectives(captured) if captured.program else None
    return Seen(
        captured.name,
        captured.versions,
        captured.graph,
        captured.text,
        float(np.abs(captured.output - output).max()),
        error_of_step(dict(captured.updated)) if captured.updated else None,
        talks,
        "measured now",
    )


def error_of_step(updated: Arrays) -> float:
    """The largest difference of a weight from one device's, as a share of how far that weight moved."""
    before, (_, expected) = weights(), in_torch.on_one_device()
    return max(
        float(np.abs(updated[name] - value).max() / np.abs(value - before[name]).max())
        for name, value in expected.items()
    )


# region placed
def placed_loss(own: bool) -> tuple[float, float]:
    """One rank's part: (the loss, the largest gradient of a norm's weight), with x and target divided by
    placement. own: the mean of squares written out; else torch's F.mse_loss."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block: Any = distribute_module(in_torch.plain_block(), mesh)
    x, target = (distribute_tensor(torch.from_numpy(value), mesh, [Shard(0)]) for value in batch())
    loss: Any = ((block(x) - target) ** 2).mean() if own else F.mse_loss(block(x), target)
    loss.backward()
    gradient = block.mlp_norm.weight.grad.full_tensor()
    return float(loss.detach().full_tensor()), float(gradient.abs().max())


# endregion


def kind_of(op: str) -> str:
    """What an operation does: one of KINDS, or "element by element"."""
    word = op.lower()
    return next((kind for kind, words in KINDS.items() if any(w in word for w in words)), _OTHER)


def draw(seen: dict[str, Seen]) -> Captioned:
    """The graphs side by side: a dot for an operation, deeper ones further down, coloured by what they do.

    Its numbers are the operations of each kind, in the legend's order.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    colours = dict(zip([*KINDS, _OTHER], (PALETTE[1], PALETTE[0], "#bbbbbb", PALETTE[2]), strict=True))
    with style():
        fig = Figure(figsize=(7.6, 5.2))  # not pyplot's, which the notebook would show once more
        axes = fig.subplots(1, len(seen))
    for ax, (name, one) in zip(axes, seen.items(), strict=True):
        places = _places(one.graph)
        for node in one.graph.nodes:
            for given in node.inputs:
                if node.name in places and given in places:
                    (x0, y0), (x1, y1) = places[given], places[node.name]
                    ax.plot((x0, x1), (y0, y1), color="#cccccc", lw=0.8, ls="-", marker="", zorder=1)
        for kind, colour in colours.items():
            chosen = [places[n.name] for n in one.graph.nodes if n.name in places and kind_of(n.op) == kind]
            if chosen:
                ax.scatter(*zip(*chosen, strict=True), s=22, color=colour, zorder=2)
        ax.set_title(f"{name}\n{len(places)} operations", fontsize=10)
        ax.invert_yaxis()
        ax.margins(x=0.3)
        ax.axis("off")
    dots = [Line2D([], [], ls="", marker="o", color=colour, label=kind) for kind, colour in colours.items()]
    fig.legend(handles=dots, loc="outside lower center", ncols=4)
    return caption(
        fig,
        kind="measured",
        text="One block in five languages. Each dot is an operation, below what it needs.",
        numbers={name: [kinds(one.graph)[kind] for kind in colours] for name, one in seen.items()},
    )


def kinds(graph: Graph) -> Counter[str]:
    """How many operations of each kind a graph has."""
    found: Counter[str] = Counter()
    for op, number in graph.counts.items():
        found[kind_of(op)] += number
    return found


def _places(graph: Graph) -> dict[str, tuple[float, float]]:
    """(across, depth) of each operation: as deep as its longest way from an input."""
    work = [node for node in graph.nodes if node.op in graph.counts]
    depth: dict[str, int] = {}
    for node in work:
        depth[node.name] = 1 + max((depth.get(given, 0) for given in node.inputs), default=0)
    across: Counter[int] = Counter()
    row = Counter(depth.values())
    places = {}
    for name, level in depth.items():
        places[name] = (across[level] - (row[level] - 1) / 2, float(level))
        across[level] += 1
    return places


def main() -> None:
    """Write the committed captures."""
    found = {}
    for name, seen in see(tuple(IN_A_PROCESS)).items():
        if seen.source != "measured now":
            raise SystemExit(f"{name} did not run: make lab-xla and make lab-frontends first")
        kept = asdict(seen)
        del kept["source"]
        found[name] = {**kept, "graph": [asdict(node) for node in seen.graph.nodes]}
    COMMITTED.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
