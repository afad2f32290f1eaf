"""Which memory is alive when, the most at any moment, and where each tensor would lie in one block.

A tensor lives from the node that makes it to the last node that reads it or a view of it. Results of the
graph live to its end; inputs belong to the caller and are not counted. What an operator allocates and frees
within itself is not seen, here as in fmlab.meter.peak_memory.
"""

import operator
from dataclasses import dataclass

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fmlab.compiler import graph as g

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass
class Lifetime:
    """Memory of one tensor: made at step `birth`, last read at step `death` (places in the graph).

    offset: where it lies in the block, in bytes.
    """

    name: str
    nbytes: int
    birth: int
    death: int
    offset: int = 0

    def meets(self, other: "Lifetime") -> bool:
        """Whether both are alive at some step."""
        return self.birth <= other.death and other.birth <= self.death


@dataclass
class MemoryPlan:
    """lifetimes: of everything that a graph makes. live: bytes alive at each step. total: without reuse.

    peak: the most bytes alive at any step: no plan needs less. block: bytes of a block in which all have
    their place; above the peak by what lies unused between neighbours.
    """

    lifetimes: list[Lifetime]
    live: list[int]
    nodes: list[str]

    @property
    def peak(self) -> int:
        return max(self.live, default=0)

    @property
    def peak_at(self) -> str:
        """The node at which the peak is reached first."""
        return self.nodes[self.live.index(self.peak)]

    @property
    def total(self) -> int:
        return sum(one.nbytes for one in self.lifetimes)

    @property
    def block(self) -> int:
        return max((one.offset + one.nbytes for one in self.lifetimes), default=0)

    def __str__(self) -> str:
        return (
            f"{len(self.lifetimes)} tensors, {self.total:,} bytes; alive at most {self.peak:,} (at "
            f"{self.peak_at}); one block of {self.block:,} bytes holds all"
        )


def plan_memory(graph: fx.Graph) -> MemoryPlan:
    """Lifetimes of a graph's tensors, and a place for each in one block: largest first, lowest fitting gap.

    Placing largest first is the "greedy by size" of Pisarchyk and Lee 2020 (arXiv:2001.03288), section 5.2.
    """
    nodes = list(graph.nodes)
    lives = list(lifetimes(nodes).values())
    place(lives)
    live = [sum(one.nbytes for one in lives if one.birth <= step <= one.death) for step in range(len(nodes))]
    return MemoryPlan(lives, live, [node.name for node in nodes])


#: A node that makes tensors, and which of them.
Storage = tuple[fx.Node, int]


def lifetimes(nodes: list[fx.Node], merged: bool = True) -> dict[Storage, Lifetime]:
    """When the memory of each tensor that the nodes of a graph make is alive; no places yet.

    merged: results that overwrite an input are one memory with it (see InPlace).
    """
    where = held(nodes, merged)
    births: dict[Storage, int] = {}
    deaths: dict[Storage, int] = {}
    for step, node in enumerate(nodes):
        if node.op == "call_function":
            for storage in where[node]:
                births.setdefault(storage, step)
        for used in (node, *node.all_input_nodes):
            for storage in where.get(used, ()):
                deaths[storage] = step
    for storage in handed(nodes, merged):
        deaths[storage] = len(nodes) - 1
    return {
        (owner, index): Lifetime(owner.name, _nbytes(owner, index), birth, deaths[owner, index])
        for (owner, index), birth in births.items()
        if owner.op == "call_function"
    }


def handed(nodes: list[fx.Node], merged: bool = True) -> set[Storage]:
    """Memory that results of the graph lie in: it outlives the graph."""
    where = held(nodes, merged)
    output = next(node for node in nodes if node.op == "output")
    return {one for node in pytree.tree_leaves(output.args[0]) for one in where.get(node, ())}


def held(nodes: list[fx.Node], merged: bool = True) -> dict[fx.Node, list[Storage]]:
    """The memory that each node's result lies in."""
    held: dict[fx.Node, list[Storage]] = {}
    for node in nodes:
        if node.op == "output":
            continue
        source = node.args[0] if node.args else None
        if g.is_view(node) and isinstance(source, fx.Node):
            held[node] = held[source]
        elif node.target is operator.getitem and isinstance(source, fx.Node):
            held[node] = [held[source][node.args[1]]]  # type: ignore[index]
        else:
            held[node] = [(node, index) for index, _ in enumerate(_leaves(node))]
            for result, k in (node.meta.get("overwrites", {}) if merged else {}).items():
                held[node][result] = held[node.args[k]][0]
    return held


def _leaves(node: fx.Node) -> list[object]:
    result = g.value(node)
    return list(result) if isinstance(result, tuple | list) else [result]


def _nbytes(node: fx.Node, index: int) -> int:
    tensor = _leaves(node)[index]
    return tensor.untyped_storage().nbytes() if isinstance(tensor, Tensor) else 0


def place(lifetimes: list[Lifetime]) -> None:
    """Give each its offset: largest first, the lowest gap that is free all its life."""
    placed: list[Lifetime] = []
    for one in sorted(lifetimes, key=lambda life: -life.nbytes):
        taken = sorted((o for o in placed if o.meets(one)), key=lambda life: life.offset)
        offset = 0
        for other in taken:
            if offset + one.nbytes <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.nbytes))
        one.offset = offset
        placed.append(one)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
