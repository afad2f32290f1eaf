"""Whether a node can be walked over row by row, and with which of the others.

A space is (rows, columns). In it a tensor is "full" [rows, columns], a "row" [columns] that is the same for
all rows, a "column" [rows] with one number a row, or a "scalar". Everything else is a boundary of fusion.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.fusion.operators import BY_ROW, ELEMENTWISE

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.bool)

Space = tuple[int, int]


def space(node: fx.Node) -> Space | None:
    """(rows, columns) that a fusible node walks over; None for a node that is a boundary."""
    if node.op != "call_function" or why_not(node) is not None:
        return None
    return space_of(walked(node))


def space_of(x: Tensor) -> Space:
    """(rows, columns) of a tensor: all dims but the last one, and the last one."""
    return (math.prod(x.shape[:-1]), x.shape[-1])


def walked(node: fx.Node) -> Tensor:
    """The tensor whose elements a node walks over: its result, or what it reduces."""
    source = node
    if node.target in BY_ROW and isinstance(node.args[0], fx.Node):
        source = node.args[0]
    if node.target is operator.getitem:
        assert isinstance(node.args[0], fx.Node)
        return walked(node.args[0])
    x = g.value(source)
    assert isinstance(x, Tensor)
    return x


def is_transparent(node: fx.Node) -> bool:
    """Whether the node is a view that leaves rows as they are: the same memory, in the same order."""
    if node.target not in (
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.detach.default,
    ):
        return False
    source, result = g.value(node.args[0]), g.value(node)
    same = source.dim() > 0 and result.dim() > 0 and source.shape[-1] == result.shape[-1]
    return bool(same and source.is_contiguous() and result.is_contiguous())


def why_not(node: fx.Node) -> str | None:
    """Why a node is a boundary of fusion: its operator, dtype, memory order or broadcasting; else None."""
    if node.target is operator.getitem:
        source = node.args[0]
        return None if isinstance(source, fx.Node) and source.target in BY_ROW else "not a fusible operator"
    if is_transparent(node):
        return None if g.value(node).dtype in DTYPES else f"dtype {g.value(node).dtype}"
    gelu = node.target in (aten.gelu.default, aten.gelu_backward.default)
    if node.target not in ELEMENTWISE and node.target not in BY_ROW and not gelu:
        return "not a fusible operator"
    results = [x for x in g.tensors(node) if x.numel()]
    if not results or any(x.dtype not in DTYPES for x in results):
        return "dtype"
    if any(not x.is_contiguous() for x in results):
        return "its result is not contiguous"
    if results[0].device.type != "cpu":
        return "not on the CPU"
    if node.target in BY_ROW:
        return _by_row(node)
    if g.value(node).dim() == 0:
        return "a single number"
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
        return "a keyword argument"
    for source in node.all_input_nodes:
        if kind(g.value(source), g.value(node)) is None:
            return f"{source.name} is broadcast or laid out in another way"
    return None


def _by_row(node: fx.Node) -> str | None:
    x = g.value(node.args[0])
    if not x.is_contiguous() or x.dim() < 2 or x.dtype not in FLOATS:
        return "its input is not contiguous"
    what, args = BY_ROW[node.target], node.args  # type: ignore[index]
    last = (-1, x.dim() - 1)
    if what in ("sum", "mean", "max"):
        dims: Any = args[1] if len(args) > 1 else None
        if (
            not dims
            or len(dims) != 1
            or dims[0] not in last
            or node.kwargs.get("dtype") not in (None, x.dtype)
        ):
            return "a reduction over another dim than the last"
        if len(args) < 3 or not args[2]:
            return "a reduction that drops its dim"
    elif what in ("softmax", "log_softmax"):
        if args[1] not in last or args[2]:
            return "a reduction over another dim than the last"
    elif what in ("softmax_backward", "log_softmax_backward"):
        if args[2] not in last or args[3] != x.dtype or not g.value(args[1]).is_contiguous():
            return "a reduction over another dim than the last"
    else:  # layer_norm (x, [d], weight, bias, eps), layer_norm_backward (g, x, [d], mean, rstd, weight, ...)
        width: Any = args[1] if what == "layer_norm" else args[2]
        if list(width) != [x.shape[-1]]:
            return "a norm over several dims"
        if any(not g.value(source).is_contiguous() for source in node.all_input_nodes):
            return "its input is not contiguous"
    return None


def kind(x: Any, like: Tensor) -> str | None:
    """How `x` is read when `like` is walked over: "full", "row", "column", "scalar", or None."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.device != like.device:
        return None
    if x.numel() == 1 and x.dim() <= like.dim():
        return "scalar"
    if not x.is_contiguous() or like.dim() == 0:
        return None
    if x.shape == like.shape:
        return "full"
    if x.dim() <= like.dim() and x.shape[-1] == like.shape[-1] and x.numel() == like.shape[-1]:
        return "row"
    if x.shape == (*like.shape[:-1], 1):
        return "column"
    return None
