"""Questions that every pass asks of a graph: shapes, bytes, which operators are views, which draw numbers.

A graph here is a torch.fx.Graph of ATen operators; `node.meta["val"]` is the node's result without data.
"""

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

aten = torch.ops.aten

#: Views that torch does not mark as such: results that share the memory of their input.
_ALSO_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}
if torch.distributed.is_available():  # a wait gives the memory that its collective fills
    _ALSO_VIEWS.add(torch.ops._c10d_functional.wait_tensor.default)


def value(node: Any) -> Any:
    """The result of a node without data: a tensor, or a tuple of tensors and numbers."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def tensors(node: fx.Node) -> list[Tensor]:
    """The tensors that a node gives."""
    return [leaf for leaf in pytree.tree_leaves(value(node)) if isinstance(leaf, Tensor)]


def nbytes(node: fx.Node) -> int:
    """Bytes of what a node gives: elements times bytes of each."""
    return sum(x.numel() * x.dtype.itemsize for x in tensors(node))


def shape(node: Any) -> tuple[int, ...]:
    """Shape of a node that gives one tensor."""
    return tuple(value(node).shape)


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that do something, in order: no inputs, no constants, no output, no picking of a result."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            yield node


def is_view(node: fx.Node) -> bool:
    """Whether the node's result lies in the memory of its first input."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if not isinstance(node.target, OpOverload):
        return False
    if node.target in _ALSO_VIEWS:
        return True
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not node.target._schema.is_mutable


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws random numbers: it may neither be dropped, joined nor moved.

    An attention without dropout draws none, though torch tags its operator like the one with dropout.
    """
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return bool(argument(node, "dropout_p", 1.0) != 0.0)


def argument(node: fx.Node, name: str, absent: Any = None) -> Any:
    """What a node gives its operator for the argument `name`: its default if nothing, `absent` if there is no
    such argument."""
    assert isinstance(node.target, OpOverload)
    for place, one in enumerate(node.target._schema.arguments):
        if one.name == name:
            if place < len(node.args) and not one.kwarg_only:
                return node.args[place]
            return node.kwargs.get(name, one.default_value if one.has_default_value() else absent)
    return absent


def is_pure(node: fx.Node) -> bool:
    """Whether the same inputs give the same result and nothing else happens."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return not (is_random(node) or node.target._schema.is_mutable)
    return node.target is operator.getitem or bool(getattr(node.target, "pure", False))


def counts(graph: fx.Graph) -> Counter[str]:
    """How many nodes of each operator."""
    return Counter(name(node) for node in calls(graph))


def name(node: fx.Node) -> str:
    """A short name of what a node does: "mm", "native_layer_norm", or a fused group's."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.removeprefix("aten::").removeprefix("_c10d_functional::")
    return str(getattr(node.target, "__name__", node.target))


def moved_bytes(graph: fx.Graph) -> int:
    """Bytes that the operators read and write: every input and result of each, views for nothing.

    What fits a cache is counted like what does not, so this is what fusion can save, not what memory sees.
    """
    total = 0
    for node in calls(graph):
        if is_view(node):
            continue
        total += nbytes(node) + sum(nbytes(source) for source in node.all_input_nodes)
    return total


def text(graph: fx.Graph) -> str:
    """One line a node: its name, dtype and shape, the operator and its arguments."""
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_kind(node)} = input")
        elif node.op == "output":
            lines.append(f"return {', '.join(map(str, pytree.tree_leaves(node.args[0])))}")
        elif node.op == "get_attr":
            lines.append(f"{node.name}: {_kind(node)} = constant")
        else:
            arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
            called = "item" if node.target is operator.getitem else name(node)
            lines.append(f"{node.name}: {_kind(node)} = {called}({', '.join(arguments)})")
    return "\n".join(lines)


def _kind(node: fx.Node) -> str:
    found = [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors(node)]
    return found[0] if len(found) == 1 else f"({', '.join(found)})"
