"""Rewrites by algebra, each only where floating-point numbers allow it.

What holds for real numbers need not hold here: x + 0 is not x for x = -0.0, x * 0 is not 0 for NaN and
infinities, x / 3 is not x * (1 / 3), a cast to 16 bits and back rounds. A rewrite is made only if each result
has the same bits, NaN and signed zeros included, unless `Algebra(fast=True)` allows a last-bit difference.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.passes.base import GraphPass, Report, drop_unread, escaping, insert, replace, same_kind

aten = torch.ops.aten

#: For a node: what to read instead, or None; the rule's name.
Rule = Callable[["Algebra", fx.Node, Report], tuple[str, fx.Node] | None]


class Algebra(GraphPass):
    """x*1, x-0, x/1, x**1, -(-x), casts there and back, views of views, x/2 as x*0.5, x**2 as x*x, and filled
    tensors as numbers.

    Args:
        fast: also x+0 as x (which keeps a -0.0 that the sum would make 0.0), and x/c as x*(1/c) for every
            constant c (off by one bit of the last place at most).
    """

    name = "algebra"
    claims = "each rewrite gives the same bits for every input, NaN, infinities and -0.0 included"

    def __init__(self, fast: bool = False):
        self.fast = fast

    def apply(self, graph: fx.Graph, report: Report) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            for rule in RULES:
                found = rule(self, node, report)
                if found is None:
                    continue
                what, new = found
                if _would_alias(graph, node, new):
                    report.refused.append(
                        f"{node.name} ({what}) is given to the caller as a tensor of its own"
                    )
                    continue
                report.made[what] += 1
                replace(node, new)
                break
        drop_unread(graph)


def _would_alias(graph: fx.Graph, node: fx.Node, new: fx.Node) -> bool:
    """Whether a result that is a tensor of its own would become an input, or another result."""
    kept = escaping(graph)
    if node not in kept or g.is_view(node):
        return False
    while g.is_view(new):
        new = new.args[0]  # type: ignore[assignment]
    return new.op != "call_function" or new in kept


def _number(argument: Any) -> int | float | None:
    """The number that an argument is, of either kind: a Python number, or a filled tensor.

    A filled tensor holds what its dtype makes of the number: 0.1 in bf16 is 0.10009765625, 2.7 in int64 is 2.
    """
    if isinstance(argument, bool):
        return None
    if isinstance(argument, int | float):
        return argument
    if isinstance(argument, fx.Node) and argument.target in (aten.full.default, aten.fill.Scalar):
        number = argument.args[1]
        dtype = g.value(argument).dtype
        if isinstance(number, fx.Node) or dtype.is_complex or dtype == torch.bool:
            return None
        held: int | float = torch.full((), number, dtype=dtype).item()  # type: ignore[arg-type]
        return held
    return None


def _identity(rule: Algebra, node: fx.Node, report: Report) -> tuple[str, fx.Node] | None:
    neutral = {
        aten.mul.Tensor: (1.0, "x*1"),
        aten.div.Tensor: (1.0, "x/1"),
        aten.sub.Tensor: (0.0, "x-0"),
        aten.add.Tensor: (0.0, "x+0"),
        aten.pow.Tensor_Scalar: (1.0, "x**1"),
    }
    if node.target not in neutral:
        return None
    number, what = neutral[node.target]
    left, right = node.args[:2]
    turns = node.target is aten.mul.Tensor or (node.target is aten.add.Tensor and not node.kwargs)
    if turns and _number(left) == number:  # 0 + alpha * x is not x
        left, right = right, left
    if not isinstance(left, fx.Node) or _number(right) != number:
        return None
    if not same_kind(left, node):
        report.refused.append(f"{node.name} ({what}) also changes shape or dtype")
        return None
    value = g.value(node)
    negative_zero = math.copysign(1.0, _number(right) or 0.0) < 0
    if what == "x+0" and value.is_floating_point() and not rule.fast and not negative_zero:
        report.refused.append(f"{node.name} (x+0) makes 0.0 of -0.0; fast=True allows it")
        return None
    if what == "x-0" and negative_zero and value.is_floating_point() and not rule.fast:
        return None
    return what, left


def _negation(rule: Algebra, node: fx.Node, report: Report) -> tuple[str, fx.Node] | None:
    inner = node.args[0] if node.args else None
    if node.target is aten.neg.default and isinstance(inner, fx.Node) and inner.target is aten.neg.default:
        assert isinstance(inner.args[0], fx.Node)
        return "-(-x)", inner.args[0]
    return None


#: dtype -> those that hold every value of it.
_WIDER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.int32: (torch.int64, torch.float64),
    torch.int16: (torch.int32, torch.int64, torch.float32, torch.float64),
}


def _is_cast(node: fx.Node) -> bool:
    """Whether the node changes the dtype alone, not the device nor the layout."""
    if node.target is not aten._to_copy.default or not set(node.kwargs) <= {"dtype", "device", "layout"}:
        return False
    source, result = g.value(node.args[0]), g.value(node)
    return bool(source.device == result.device and source.stride() == result.stride())


def _casts(rule: Algebra, node: fx.Node, report: Report) -> tuple[str, fx.Node] | None:
    if not _is_cast(node):
        return None
    inner = node.args[0]
    assert isinstance(inner, fx.Node)
    if same_kind(inner, node):
        return "cast to its own dtype", inner
    if not _is_cast(inner):
        return None
    first = inner.args[0]
    assert isinstance(first, fx.Node)
    start, middle = g.value(first).dtype, g.value(inner).dtype
    if middle not in _WIDER.get(start, ()):
        report.refused.append(f"{node.name}: {start} -> {middle} -> {g.value(node).dtype} rounds on the way")
        return None
    if same_kind(first, node):
        return "cast there and back", first
    return "double cast", insert(node, aten._to_copy.default, first, **node.kwargs)


def _views(rule: Algebra, node: fx.Node, report: Report) -> tuple[str, fx.Node] | None:
    inner = node.args[0] if node.args else None
    if not isinstance(inner, fx.Node) or not isinstance(g.value(inner), Tensor):
        return None
    view = node.target in (aten.view.default, aten.expand.default, aten._unsafe_view.default)
    if node.target is aten._unsafe_view.default and any(user.op == "output" for user in node.users):
        return (
            None  # it gives the caller a tensor that may be changed in place, as a view of a result may not
        )
    if view and g.shape(inner) == g.shape(node) and g.value(inner).stride() == g.value(node).stride():
        return "view of its own shape", inner
    if node.target is aten.view.default and inner.target in (aten.view.default, aten._unsafe_view.default):
        first = inner.args[0]
        assert isinstance(first, fx.Node)
        if g.value(first).is_contiguous():
            return "view of a view", insert(node, aten.view.default, first, node.args[1])
    return None


def _division(rule: Algebra, node: fx.Node, report: Report) -> tuple[str, fx.Node] | None:
    if node.target is not aten.div.Tensor or not isinstance(node.args[0], fx.Node):
        return None
    number = _number(node.args[1])
    if (
        number is None
        or isinstance(node.args[1], fx.Node)
        or number in (0.0, 1.0)
        or not math.isfinite(number)
    ):
        return None
    if not g.value(node).dtype.is_floating_point or g.value(node).dtype.itemsize < 4:
        return None
    exact = math.frexp(number)[0] in (0.5, -0.5) and 2**-100 < abs(number) < 2**100
    if not (exact or rule.fast):
        report.refused.append(f"{node.name}: x/{number:g} and x*{1 / number:g} differ in the last bit")
        return None
    return "x/c as x*(1/c)", insert(node, aten.mul.Tensor, node.args[0], 1 / number)


def _square(rule: Algebra, node: fx.Node, report: Report) -> tuple[str, fx.Node] | None:
    if (
        node.target is aten.pow.Tensor_Scalar
        and node.args[1] in (2, 2.0)
        and isinstance(node.args[0], fx.Node)
    ):
        new = insert(node, aten.mul.Tensor, node.args[0], node.args[0])
        if same_kind(new, node):
            return "x**2 as x*x", new
        node.graph.erase_node(new)
    return None


def _filled(rule: Algebra, node: fx.Node, report: Report) -> tuple[str, fx.Node] | None:
    """An operand that is filled with one number becomes that number, and need not be made nor read."""
    operators = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
    if node.target not in operators or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    turned: dict[Any, Any] = {aten.mul.Tensor: aten.mul.Tensor, aten.add.Tensor: aten.add.Tensor}
    turned[aten.sub.Tensor] = aten.rsub.Scalar
    if (number := _number(right)) is not None and same_kind(left, node):
        made = insert(node, node.target, left, number)
    elif (number := _number(left)) is not None and same_kind(right, node) and node.target in turned:
        made = insert(node, turned[node.target], right, number)
    else:
        return None
    if not same_kind(made, node):  # such as a whole number divided by a whole number
        node.graph.erase_node(made)
        return None
    return "filled tensor as a number", made


RULES: tuple[Rule, ...] = (_identity, _negation, _casts, _views, _division, _square, _filled)
