"""A graph that runs under a meter, and a picture of what is alive when in its memory plan.

ran = run_graph(program.forward)         peak bytes, bytes moved: of real tensors, filled with zeros
show_plan(plan_memory(graph), ran.peak)  each tensor a box: as long as it lives, where it lies
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import MemoryPlan, Runner
from fmlab.lab.figures import PALETTE, Captioned, caption, figure
from fmlab.meter import peak_memory


@dataclass(frozen=True)
class Ran:
    """What a run of a graph showed. peak: the most bytes alive, inputs not counted. moved: bytes of the
    tensors that operators were given and gave; results in the memory of an input count for nothing."""

    peak: int
    moved: int


def run_graph(module: fx.GraphModule) -> Ran:
    """Run a graph on zeros of the shapes that it was captured for, once for each meter."""
    wanted = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]

    def zeros() -> list[Tensor]:
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_() for x in wanted]

    inputs = zeros()
    run, held = Runner(module), list(inputs)  # the caller's, who keeps them
    with peak_memory() as memory:
        results = run(inputs)
    del results, held
    counting = _Counting(module)
    counting.run(*zeros())
    return Ran(memory.peak, counting.moved)


class _Counting(fx.Interpreter):
    """Runs a graph node by node and adds up the bytes that each is given and gives."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.moved = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and n.target is not operator.getitem:
            made = _tensors(result)
            read = [x for source in n.all_input_nodes for x in _tensors(self.env.get(source))]
            known = {x.untyped_storage().data_ptr() for x in read}
            fresh = [x for x in made if x.untyped_storage().data_ptr() not in known]
            if fresh:
                self.moved += sum(x.numel() * x.itemsize for x in (*fresh, *read))
        return result


def _tensors(value: Any) -> list[Tensor]:
    several = value if isinstance(value, tuple | list) else [value]
    return [x for x in several if isinstance(x, Tensor)]


def show_plan(plan: MemoryPlan, measured: int, text: str = "", least: float = 0.01) -> Captioned:
    """Each tensor of a plan as a box, from the step that makes it to the last that reads it, and as high as
    its bytes; the line is what is alive.

    measured: peak bytes of a run. least: tensors below this share of the block are not drawn.
    """
    fig, ax = figure(x="step of the graph [nodes]", y="place in the block [MB]", height=3.4)
    for count, one in enumerate(plan.lifetimes):
        if one.nbytes < least * plan.block:
            continue
        colour = PALETTE[count % 6]
        ax.bar(
            one.birth, one.nbytes / 1e6, one.death - one.birth + 1, one.offset / 1e6,
            align="edge", color=colour, alpha=0.45, edgecolor=colour, linewidth=0.8,
        )  # fmt: skip
    steps = range(len(plan.live))
    ax.step(steps, [b / 1e6 for b in plan.live], where="post", color="black", ls="-", label="alive")
    ax.axhline(measured / 1e6, color="black", ls=":", lw=1.2, label="measured peak")
    ax.legend(loc="upper left", ncols=2)
    ax.set_ylim(0, 1.22 * plan.block / 1e6)
    text = text or f"{len(plan.lifetimes)} tensors share a block of {plan.block / 1e6:.3g} MB."
    numbers = {"planned peak, block, without reuse [B]": [plan.peak, plan.block, plan.total]}
    return caption(fig, kind="modelled", text=text, numbers={**numbers, "measured peak [B]": measured})
