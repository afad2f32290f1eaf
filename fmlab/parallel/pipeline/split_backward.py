"""The backward pass of a chunk in two parts: the gradients of its inputs, then those of its weights.

Qi et al. 2023, arXiv:2401.10241, section 2. In autograd's graph of a chunk, some nodes lie on a way from the
outputs to the inputs; B visits these and no others. Where such a node also leads off the way, to weights, it
owes them a gradient. What it needs for that is the gradient that came into it and what it saved, so B notes
the first and W begins there:

    outputs ── node ── node ── node ── inputs         B: along the way, noting what comes into each node
                 └─ weight       └─ weight, bias      W: from each noted node, down to its own weights only

A product's node is asked twice, each time for one of its two products: nothing is computed twice. Two kinds
of weights are dealt with in B, where their gradients come up in full, and W only adds them up: those below a
node that computes all its gradients at once, such as a Python function, and those that several nodes lead to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Edge = tuple[Node, int]  # a node and which of its results
#: Nodes that must be asked for all their gradients together. In channels_last memory torch 2.13's kernel for
#: the CPU ends the process when the gradient of its input is not among them.
_AT_ONCE = ("NativeGroupNormBackward0",)


@dataclass
class Owing:
    """A node on the way, with the numbers of its results, and the weights (as leaves) that it leads off
    to."""

    node: Node
    numbers: tuple[int, ...]
    leaves: set[Node]
    edges: tuple[GradientEdge, ...] = ()
    gradients: tuple[Tensor | None, ...] = ()


class SplitBackward:
    """The backward pass of one micro-batch through one chunk.

    outputs:   with their gradients; inputs: what the first part is to find the gradients of, no leaves needed
               (the first chunk has no inputs: what its first block makes stands for them)
    """

    def __init__(self, outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge]) -> None:
        self.outputs, self.inputs = list(outputs), list(inputs)
        self._gradients: list[Tensor | None] = []  # of the outputs, where there is no way to an input
        self._owing: list[Owing] = []
        self._early: dict[Node, Tensor | None] = {}  # leaves whose gradients B has found

    # region input
    def input_pass(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """B: the gradients of the inputs, given those of the outputs. The graph and what it saved stay."""
        if not self.inputs or not self.outputs:
            self._gradients = list(gradients)  # nothing is waited for: all is left to W
            return [None] * len(self.inputs)
        self._owing, early = _divide(self.outputs, self.inputs)
        edges = [GradientEdge(leaf, 0) for leaf in early]
        for owing in self._owing:
            owing.edges = tuple(GradientEdge(owing.node, number) for number in owing.numbers)
            edges += owing.edges
        found = torch.autograd.grad(
            self.outputs, [*self.inputs, *edges], list(gradients), retain_graph=True, allow_unused=True
        )
        self.outputs = []
        wanted, rest = found[: len(self.inputs)], iter(found[len(self.inputs) :])
        self._early = {leaf: next(rest) for leaf in early}
        for owing in self._owing:
            owing.gradients = tuple(next(rest) for _ in owing.edges)
        return list(wanted)

    # endregion

    # region weight
    def weight_pass(self) -> None:
        """W: add the gradients of the weights to `.grad`, as a whole backward pass would (hooks run too)."""
        if self._gradients:
            torch.autograd.backward(self.outputs, self._gradients)
        _backward([(GradientEdge(leaf, 0), g) for leaf, g in self._early.items()])
        for owing in self._owing:
            _backward(
                zip(owing.edges, owing.gradients, strict=True), [GradientEdge(n, 0) for n in owing.leaves]
            )
        self._gradients, self._owing, self._early = [], [], {}

    # endregion

    @property
    def held(self) -> int:
        """Bytes of the gradients that wait for W."""
        waiting = [*self._gradients, *self._early.values(), *(g for o in self._owing for g in o.gradients)]
        return sum(g.numel() * g.element_size() for g in waiting if g is not None)


def _backward(
    roots: Iterable[tuple[GradientEdge, Tensor | None]], leaves: Sequence[GradientEdge] | None = None
) -> None:
    known = [(edge, gradient) for edge, gradient in roots if gradient is not None]
    if known:
        torch.autograd.backward([edge for edge, _ in known], [g for _, g in known], inputs=leaves)


# region divide
def _divide(
    outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge]
) -> tuple[list[Owing], list[Node]]:
    """(The nodes whose weights W sees to, the leaves whose gradients B must find itself)."""
    ends = {edge.node for edge in inputs}
    order, numbers = _visit(outputs, ends)
    on_way: set[Node] = set()
    for node in order:  # children come first
        if node in ends or any(child in on_way for child, _ in node.next_functions):
            on_way.add(node)
    early: dict[Node, None] = {}
    owing: list[Owing] = []
    seen: set[Node] = set()
    aside = {edge.node for edge in outputs} - on_way  # outputs that no input leads to
    for node in (node for node in order if node in on_way or node in aside):
        if node in ends and _is_leaf(node):
            continue  # an input itself
        off_way = [c for c, _ in node.next_functions if c is not None and c not in on_way]
        leaves, at_once = _leaves([node] if node in ends or node in aside else off_way)
        at_once = at_once or isinstance(node, BackwardCFunction) or node.name() in _AT_ONCE
        early |= dict.fromkeys(leaves if at_once else leaves & seen)
        seen |= leaves
        owing.append(Owing(node, tuple(sorted(numbers[node])), leaves))
    for one in owing:
        one.leaves -= early.keys()
    return [one for one in owing if one.leaves], list(early)


# endregion


def _visit(roots: Sequence[GradientEdge], ends: set[Node]) -> tuple[list[Node], dict[Node, set[int]]]:
    """All nodes down to `ends`, children before their parents, and which results of each are used."""
    numbers: dict[Node, set[int]] = {}
    order: list[Node] = []
    stack: list[tuple[Node, Any]] = []

    def enter(node: Node | None, number: int) -> None:
        if node is None:
            return
        if node not in numbers:
            stack.append((node, iter(() if node in ends else node.next_functions)))
        numbers.setdefault(node, set()).add(number)

    for root in roots:
        enter(root.node, root.output_nr)
        while stack:
            node, children = stack[-1]
            child = next(children, None)
            if child is None:
                order.append(node)
                stack.pop()
            else:
                enter(*child)
    return order, numbers


def _leaves(nodes: Sequence[Node]) -> tuple[set[Node], bool]:
    """The leaves below nodes, and whether a Python function lies in between."""
    leaves, python = set(), False
    todo, seen = list(nodes), set(nodes)
    while todo:
        node = todo.pop()
        python = python or isinstance(node, BackwardCFunction)
        if _is_leaf(node):
            leaves.add(node)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    return leaves, python


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")  # autograd's AccumulateGrad


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where the gradient of a tensor enters the graph. Unlike the tensor, it does not keep its memory."""
    return get_gradient_edge(tensor)
