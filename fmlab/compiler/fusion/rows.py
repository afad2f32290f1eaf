"""Whether a node can be walked over row by row, and with which of the others.

A space is (rows, columns): all dims but the last one, and the last one. Of images in channels_last memory
[n,c,h,w] the rows are the pixels and the columns the channels, which is how they lie in memory. In a space a
tensor is "full" [rows, columns], a "row" [columns] that is the same for all rows, a "column" [rows] with one
number a row, a "scalar", or of images an "image" [n, columns]. Everything else is a boundary of fusion.

Rows may also be parts of wider ones: the halves of x[..., 2c] that split, chunk or a slice give are full in a
space of c columns, since their rows lie a fixed distance apart. That is for reading; what is written has rows
of its own, or is joined by `cat` to rows of a wider result.
"""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.fusion.operators import BY_IMAGE, BY_ROW, ELEMENTWISE, JOINING, LABELLED, REDUCING

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SINGLE = (torch.float32, torch.bfloat16, torch.float16)  # arithmetic on these is fp32
DTYPES = (*FLOATS, torch.bool)

Space = tuple[int, int]


def space(node: fx.Node) -> Space | None:
    """(rows, columns) that a fusible node walks over; None for a node that is a boundary."""
    if node.op != "call_function" or why_not(node) is not None:
        return None
    return space_of(walked(node))


def space_of(x: Tensor) -> Space:
    """(rows, columns) of a tensor: all dims but the last one in memory, and the last one."""
    sizes = laid_out(x)
    assert sizes is not None
    return (math.prod(sizes[:-1]), sizes[-1])


def laid_out(x: Tensor) -> tuple[int, ...] | None:
    """A tensor's sizes in the order of memory: [n,h,w,c] of one in channels_last; None if there are gaps, but
    for those between parts of wider rows."""
    if x.is_contiguous() or pitch(x) is not None:
        return tuple(x.shape)
    return (x.shape[0], *x.shape[2:], x.shape[1]) if is_pixels(x) else None


def pitch(x: Tensor) -> int | None:
    """Of a tensor whose rows are parts of wider ones, such as x[..., 3:7], the elements from one row to the
    next; None where rows follow each other, overlap, or lie in any other way."""
    if x.dim() < 2 or x.is_contiguous() or x.stride(-1) != 1:
        return None
    step: int | None = None
    width = 0
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if step is not None and stride != step:
            return None
        width = width or stride
        step = size * stride
    return width if width > x.shape[-1] else None


def extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor and the one behind its last, whatever lies between its rows."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.itemsize if x.numel() else 0)


def is_pixels(x: Tensor) -> bool:
    """Whether a tensor [n,c,h,w] lies in channels_last memory and not in the plain order as well."""
    last = torch.channels_last
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=last)


def walked(node: fx.Node) -> Tensor:
    """The tensor whose elements a node walks over: its result, or what it reduces."""
    source = node
    if node.target in REDUCING and node.target is not aten.nll_loss_backward.default:
        assert isinstance(node.args[0], fx.Node)
        source = node.args[0]
    if node.target is operator.getitem:
        assert isinstance(node.args[0], fx.Node)
        return walked(node.args[0])
    if node.target is JOINING:
        source = node.all_input_nodes[0]
    x = g.value(source)
    assert isinstance(x, Tensor)
    return x


_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.detach.default,
    aten.permute.default,
)


def is_transparent(node: fx.Node) -> bool:
    """Whether the node is a view that leaves rows as they are: the same memory, in the same order."""
    if node.target not in _VIEWS:
        return False
    source, result = laid_out(g.value(node.args[0])), laid_out(g.value(node))
    return bool(source and result and source[-1] == result[-1])


def why_not(node: fx.Node) -> str | None:
    """Why a node is a boundary of fusion: its operator, dtype, memory order or broadcasting; else None."""
    if node.target is operator.getitem:
        source = node.args[0]
        several = isinstance(source, fx.Node) and source.target in REDUCING
        return why_not(source) if several else "not a fusible operator"  # type: ignore[arg-type]
    if is_transparent(node):
        return None if g.value(node).dtype in DTYPES else f"dtype {g.value(node).dtype}"
    gelu = node.target in (aten.gelu.default, aten.gelu_backward.default)
    if node.target is JOINING:
        return _joining(node)
    if node.target not in ELEMENTWISE and node.target not in REDUCING and not gelu:
        return "not a fusible operator"
    results = [x for x in g.tensors(node) if x.numel()]
    if not results or any(x.dtype not in DTYPES for x in results):
        return "dtype"
    if any(laid_out(x) is None or pitch(x) is not None for x in results):
        return "its result is not contiguous"
    if node.target in BY_ROW:
        return _by_row(node)
    if node.target in LABELLED:
        return _labelled(node)
    if node.target in BY_IMAGE:
        return _by_image(node)
    return _elementwise(node)


#: Whose third argument is a factor of the second.
_SCALED = (aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar)


def _elementwise(node: fx.Node) -> str | None:
    if g.value(node).dim() == 0:
        return "a single number"
    if any(node.target in _SCALED and argument != 1 for argument in node.args[2:]):
        return "a factor"
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
        return "a keyword argument"
    if node.target is aten._to_copy.default:
        changed = {key for key, asked in node.kwargs.items() if asked is not None}
        dtypes = (g.value(node.args[0]).dtype, g.value(node).dtype)
        if not changed <= {"dtype"} or any(dtype not in SINGLE for dtype in dtypes):
            return "a copy to another kind of memory, or between dtypes that are not computed in fp32"
    for source in node.all_input_nodes:
        if kind(g.value(source), g.value(node)) is None:
            return f"{source.name} is broadcast or laid out in another way"
    return None


def _by_row(node: fx.Node) -> str | None:
    x = g.value(node.args[0])
    what, args = BY_ROW[node.target], node.args  # type: ignore[index]
    if what == "sum" and is_sum_of_rows(node):
        return None if x.dtype in FLOATS else "dtype"
    if not _in_rows(x) or x.dim() < 2 or x.dtype not in FLOATS:
        return "its input is not contiguous"
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
        if args[2] not in last or args[3] != x.dtype or not _in_rows(g.value(args[1])):
            return "a reduction over another dim than the last"
    else:  # layer_norm (x, [d], weight, bias, eps), layer_norm_backward (g, x, [d], mean, rstd, weight, ...)
        width: Any = args[1] if what == "layer_norm" else args[2]
        if list(width) != [x.shape[-1]]:
            return "a norm over several dims"
        others = [y for source in node.all_input_nodes if (y := g.value(source)).shape != x.shape]
        whole = [y for source in node.all_input_nodes if (y := g.value(source)).shape == x.shape]
        if not all(y.is_contiguous() for y in others) or not all(map(_in_rows, whole)):
            return "its input is not contiguous"
    return None


def _in_rows(x: Tensor) -> bool:
    """Whether a tensor's rows lie in the plain order, close by or as parts of wider ones."""
    return x.is_contiguous() or pitch(x) is not None


def _joining(node: fx.Node) -> str | None:
    """`cat` side by side of parts with equally many columns: each part is written to its place."""
    parts: Any = node.args[0]
    result, first = g.value(node), g.value(parts[0])
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if result.dim() < 2 or dim not in (-1, result.dim() - 1):
        return "it joins along another dim than the last"
    if any(g.value(part).shape != first.shape for part in parts) or first.shape[-1] == 1:
        return "it joins parts of several widths, or columns"
    if any(g.value(part).dtype != result.dtype or not _in_rows(g.value(part)) for part in parts):
        return "it joins parts of several dtypes or orders of memory"
    return None if result.is_contiguous() and result.dtype in FLOATS else "its result is not contiguous"


def is_sum_of_rows(node: fx.Node) -> bool:
    """Whether a sum goes over all dims but the columns, as the gradient of a bias does."""
    if node.target is not aten.sum.dim_IntList or node.kwargs.get("dtype") is not None:
        return False
    x, dims = g.value(node.args[0]), node.args[1]
    if laid_out(x) is None or x.dim() < 2 or not isinstance(dims, list | tuple):
        return False
    kept = 1 if is_pixels(x) else x.dim() - 1
    over: Any = dims
    return {dim % x.dim() for dim in over} == set(range(x.dim())) - {kept}


def _labelled(node: fx.Node) -> str | None:
    loss = node.target is aten.nll_loss_forward.default
    scores, labels, weight, reduction = node.args[:4] if loss else node.args[1:5]
    x, target = g.value(scores), g.value(labels)
    if x.dim() != 2 or not x.is_contiguous() or x.dtype not in FLOATS:
        return "log-probabilities that are not rows of contiguous numbers"
    if target.dtype != torch.int64 or target.dim() != 1 or not target.is_contiguous():
        return "labels that are not int64, one a row"
    if weight is not None:
        return "a loss with a weight for each class"
    return None if reduction in (1, 2) else "a loss of each row"


def _by_image(node: fx.Node) -> str | None:
    forward = node.target is aten.native_group_norm.default
    images = node.args[:1] if forward else node.args[:2]
    if any(not is_pixels(g.value(x)) for x in images):
        return "a group norm of images that are not in channels_last memory"
    others = [source for source in node.all_input_nodes if source not in images]
    if any(not g.value(source).is_contiguous() for source in others):
        return "its input is not contiguous"
    if g.value(images[0]).dtype not in FLOATS or not is_pixels(g.tensors(node)[0]):
        return "its result is not in channels_last memory"
    return None


def kind(x: Any, like: Tensor) -> str | None:
    """How `x` is read when `like` is walked over: "full", "row", "column", "image", "scalar", or None."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.device != like.device:
        return None
    if x.numel() == 1 and x.dim() <= like.dim():
        return "scalar"
    if laid_out(x) is None or like.dim() == 0:
        return None
    if x.shape == like.shape:
        same = is_pixels(x) == is_pixels(like)
        return "full" if same else None
    if is_pixels(like):
        return _of_pixels(x, like)
    if not x.is_contiguous():
        return None
    if x.dim() <= like.dim() and x.shape[-1] == like.shape[-1] and x.numel() == like.shape[-1]:
        return "row"
    if x.shape == (*like.shape[:-1], 1):
        return "column"
    return None


def _of_pixels(x: Tensor, like: Tensor) -> str | None:
    n, c, h, w = like.shape
    shapes: dict[tuple[int, ...], str] = {(1, c, 1, 1): "row", (n, c, 1, 1): "image", (n, 1, h, w): "column"}
    shape = (1,) * (4 - x.dim()) + tuple(x.shape)
    return shapes.get(shape) if x.is_contiguous() else None
