"""From the operators of a fused group to a program over rows."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.rows import NARROW, RowProgram, Value
from fmlab.compiler.codegen.rules import Joined, Rules, SumOfRows, Total
from fmlab.compiler.fusion.kernel import FusedKernel
from fmlab.compiler.fusion.operators import (
    ELEMENTWISE,
    GELU,
    GELU_BACKWARD,
    JOINING,
    REDUCING,
    Elementwise,
)
from fmlab.compiler.fusion.rows import SINGLE, is_pixels, is_transparent, kind, pitch

aten = torch.ops.aten
#: dtypes in memory that differ from the arithmetic's
STORED = {
    torch.bool: "bool",
    torch.int64: "int64_t",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}

NARROW_DTYPES = (torch.bfloat16, torch.float16)
COMPARISONS = {getattr(aten, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne")}


class Unsupported(Exception):
    """A group that no code is generated for; says why."""


def lower(kernel: FusedKernel) -> RowProgram:
    """The program of a group. Raises Unsupported for a mix of dtypes."""
    return _Lowering(kernel).program


class _Lowering(Rules):
    def __init__(self, kernel: FusedKernel):
        self.rows, self.columns = kernel.space
        nodes = list(kernel.graph.nodes)
        self.program = RowProgram(_arithmetic(nodes), *images_of(nodes))
        self.inputs = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
        self.values: dict[fx.Node, Any] = {}
        self.loads: dict[tuple[fx.Node, str], Value] = {}
        self.hot: dict[Value, Value] = {}  # rows with one element that is not 0, and that element
        for node in nodes:
            if node.op == "call_function":
                self.values[node] = self._node(node)
        output = next(node for node in nodes if node.op == "output")
        for number, node in enumerate(output.args[0], len(self.inputs)):
            self._store(self.values[node], number, self._ctype(node))

    def _store(self, value: Any, number: int, ctype: str) -> None:
        if isinstance(value, SumOfRows):
            self.program.sum_rows(value.of, number, ctype)
        elif isinstance(value, Total):
            self.program.end(value.expression, number, ctype)
        elif isinstance(value, Joined):
            self.program.join(value.parts, number, ctype)
        else:
            self.program.store(value, number, ctype)

    def _node(self, node: fx.Node) -> Any:
        if is_transparent(node):
            return self._read(node.args[0], g.value(node))
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.target in REDUCING:
            rule: Callable[[fx.Node], Any] = getattr(self, f"_{REDUCING[node.target]}")
            return rule(node)
        if node.target is JOINING:
            return Joined([self._full(part) for part in node.args[0]])  # type: ignore[union-attr]
        element = _elementwise(node)
        sources: list[Value] = []
        texts = []
        for argument in node.args:
            if isinstance(argument, fx.Node):
                texts.append(f"{{{len(sources)}}}")
                sources.append(self._read(argument, g.value(node)))
            else:
                texts.append(_literal(_compared(node, argument)))
        ctype = "bool" if g.value(node).dtype == torch.bool else "T"
        return self.program.apply(
            element.expression.format(*texts), *sources, ctype=ctype, flops=element.flops
        )

    def _read(self, node: Any, like: Tensor | None = None) -> Value:
        """The value of a node; `like`: what is walked over, where that tells how an input is read."""
        assert isinstance(node, fx.Node)
        if node in self.values:
            value = self.values[node]
            if not isinstance(value, Value):
                raise Unsupported(f"{node.name} is a sum over rows that the same group reads")
            return value
        return self._load(node, self._kind(g.value(node), like))

    def _load(self, node: fx.Node, kind: str) -> Value:
        if (node, kind) not in self.loads:
            apart = pitch(g.value(node))
            if apart is not None and kind != "full":
                raise Unsupported(f"{node.name} is part of wider rows and read as a {kind}")
            how = kind if apart is None else "part"
            self.loads[node, kind] = self.program.load(
                self.inputs[node], how, self._ctype(node), apart or self.columns
            )
        return self.loads[node, kind]

    def _ctype(self, node: fx.Node) -> str:
        """What a node's elements are in memory, in C++."""
        return STORED.get(g.value(node).dtype, "T")

    def _kind(self, x: Tensor, like: Tensor | None) -> str:
        if like is not None and is_pixels(like) and (found := kind(x, like)) is not None:
            return found
        last = x.shape[-1] if x.dim() else 1
        if x.numel() == 1:
            return "scalar"
        if x.numel() == self.rows * self.columns and (last == self.columns or is_pixels(x)):
            return "full"
        if x.numel() == self.columns and last == self.columns:
            return "row"
        if x.numel() == self.rows and last == 1:
            return "column"
        raise Unsupported(f"an input {list(x.shape)} among {self.rows} rows of {self.columns}")

    def _full(self, node: Any) -> Value:
        value = self._read(node)
        if value.kind != "full":
            raise Unsupported("a reduction of what is one number a row already")
        return value


def _elementwise(node: fx.Node) -> Elementwise:
    approximate = str(node.kwargs.get("approximate", "none"))
    if node.target is aten.gelu.default:
        return GELU[approximate]
    if node.target is aten.gelu_backward.default:
        return GELU_BACKWARD[approximate]
    stored = STORED.get(g.value(node).dtype)
    if node.target is aten._to_copy.default and stored in NARROW:
        inside, outside = NARROW[stored]
        return Elementwise(f"{inside}({outside}({{0}}))", 6)
    return ELEMENTWISE[node.target]


def _arithmetic(nodes: list[fx.Node]) -> str:
    """float or double; Unsupported for a mix of the two."""
    dtypes = {x.dtype for node in nodes for x in g.tensors(node)} - {torch.bool, torch.int64}
    for name, allowed in (("float", set(SINGLE)), ("double", {torch.float64})):
        if dtypes and dtypes <= allowed:
            return name
    raise Unsupported(f"dtypes {sorted(map(str, dtypes))}: float64 alone, or others without it")


def images_of(nodes: list[fx.Node]) -> tuple[int, int]:
    """Pixels of an image, and groups of its norms; 0 where there are none."""
    images = [x for node in nodes for x in g.tensors(node) if is_pixels(x)]
    pixels = {math.prod(x.shape[2:]) for x in images}
    groups: set[Any] = set()
    for node in nodes:
        if node.target is aten.native_group_norm.default:
            groups.add(node.args[6])
        elif node.target is aten.native_group_norm_backward.default:
            groups.add(node.args[8])
    if len(groups) > 1 or len(pixels) > 1:
        raise Unsupported(f"norms of {sorted(groups)} groups, images of {sorted(pixels)} pixels: one of each")
    return (pixels.pop() if pixels else 0), (groups.pop() if groups else 0)


def _compared(node: fx.Node, number: Any) -> Any:
    """A number that elements are compared with has their dtype, as in torch: 0.1 is 0.1001 in bf16."""
    dtype = g.value(node.args[0]).dtype
    if node.target not in COMPARISONS or dtype not in NARROW_DTYPES or isinstance(number, bool):
        return number
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def _literal(number: Any) -> str:
    """A Python number in C++."""
    if isinstance(number, bool):
        return str(number).lower()
    if math.isnan(number):
        return "std::numeric_limits<T>::quiet_NaN()"
    if math.isinf(number):
        return f"({'-' if number < 0 else ''}std::numeric_limits<T>::infinity())"
    return f"T({float(number)!r})"
