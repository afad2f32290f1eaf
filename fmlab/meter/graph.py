"""The depth of a computation: how many operations must wait for one another."""

from typing import Any

from torch import Tensor


def graph_depth(output: Tensor) -> int:
    """Operations on the longest path of the autograd graph from `output` back to its inputs.

    A machine with any number of processors still has to take so many steps one after another,
    forward; the backward pass walks the same path. Leaves (parameters, inputs) are not operations.
    Raises ValueError for a tensor without a graph.
    """
    if output.grad_fn is None:
        raise ValueError("the tensor has no graph: nothing that requires a gradient led to it")
    depth: dict[Any, int] = {}
    stack: list[tuple[Any, bool]] = [(output.grad_fn, False)]
    while stack:  # not by recursion: a recurrent network's graph is deeper than Python's stack
        node, parents_done = stack.pop()
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if parents_done:
            counts = type(node).__name__ != "AccumulateGrad"
            depth[node] = counts + max((depth[parent] for parent in parents), default=0)
        elif node not in depth:
            stack.append((node, True))
            stack += [(parent, False) for parent in parents if parent not in depth]
    return depth[output.grad_fn]
