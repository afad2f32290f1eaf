"""Gradients of slices that make up a whole are joined instead of padded with zeros and added up."""

from typing import Any

import torch
from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.passes.base import GraphPass, Report, drop_unread, insert, replace

aten = torch.ops.aten


class JoinSlices(GraphPass):
    """The gradients of x[..., :3] and x[..., 3:] are two tensors as large as x, nearly all zeros, and their
    sum; they become one `cat`, which fusion can take over. Any number of slices, along any dim.

    Left alone: slices that overlap, leave a gap or take every second element, gradients that somebody else
    reads too, and sums with anything else in them.
    """

    name = "join slices"
    claims = "the same numbers; a -0.0 stays one where adding 0.0 makes it 0.0"

    def apply(self, graph: fx.Graph, report: Report) -> None:
        for node in reversed(list(graph.nodes)):  # the whole sum before the sums in it
            if node.target is not aten.add.Tensor:
                continue
            if not node.users:  # of a whole that was joined
                graph.erase_node(node)
                continue
            parts = _parts(node)
            if len(parts) < 2 or any(part.target is not aten.slice_backward.default for part in parts):
                continue
            if why := _why_not(parts):
                report.refused.append(f"{node.name}: {why}")
                continue
            parts.sort(key=_span)
            gradients = [part.args[0] for part in parts]
            replace(node, insert(node, aten.cat.default, gradients, parts[0].args[2]))
            report.made["join"] += 1
        drop_unread(graph)


def _parts(node: fx.Node) -> list[Any]:
    """What a sum adds up, through sums that nobody else reads; nothing for one that broadcasts or scales."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    found: list[Any] = []
    for source in node.args[:2]:
        if not isinstance(source, fx.Node) or g.value(source).shape != g.value(node).shape:
            return []
        found += (_parts(source) if len(source.users) == 1 else []) or [source]
    return found


def _span(part: fx.Node) -> tuple[int, int]:
    """Where a slice begins and ends, counted from the front."""
    _, sizes, dim, *bounds = part.args[:5]
    whole: Any = sizes[dim]  # type: ignore[index]
    first, last = (min(int(at) + (whole if at < 0 else 0), whole) for at in bounds)  # type: ignore[arg-type, operator]
    return first, last


def _why_not(parts: list[fx.Node]) -> str | None:
    """slice_backward(gradient, sizes, dim, start, end, step) of each part: why they make up no whole."""
    _, sizes, dim, *_ = parts[0].args
    if any(len(part.users) > 1 for part in parts):
        return "somebody else reads the gradient of a slice"
    if any(part.args[2] != dim or part.args[5] != 1 for part in parts):
        return "slices along several dims, or with steps"
    whole: Any = sizes[dim]  # type: ignore[index]
    spans = sorted(map(_span, parts))
    if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), whole]:
        return "slices that overlap or leave a gap"
    return None
