"""From the operators of a fused group to a program over rows."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.rows import RowProgram, Value
from fmlab.compiler.fusion.kernel import FusedKernel
from fmlab.compiler.fusion.operators import BY_ROW, ELEMENTWISE, GELU, GELU_BACKWARD, Elementwise
from fmlab.compiler.fusion.rows import is_transparent

aten = torch.ops.aten
CTYPES = {torch.float32: "float", torch.float64: "double"}


class Unsupported(Exception):
    """A group that no code is generated for; says why."""


def lower(kernel: FusedKernel) -> RowProgram:
    """The program of a group. Raises Unsupported for a mix of dtypes."""
    return _Lowering(kernel).program


class _Lowering:
    def __init__(self, kernel: FusedKernel):
        self.rows, self.columns = kernel.space
        nodes = list(kernel.graph.nodes)
        dtypes = {x.dtype for node in nodes for x in g.tensors(node)} - {torch.bool}
        if len(dtypes) != 1 or not dtypes <= set(CTYPES):
            raise Unsupported(
                f"dtypes {sorted(map(str, dtypes))}: one of {sorted(map(str, CTYPES))} throughout"
            )
        self.program = RowProgram(CTYPES[dtypes.pop()])
        self.inputs = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
        self.values: dict[fx.Node, Any] = {}
        self.loads: dict[tuple[fx.Node, str], Value] = {}
        self.column_sums: dict[int, Value] = {}
        for node in nodes:
            if node.op == "call_function":
                self.values[node] = self._node(node)
        output = next(node for node in nodes if node.op == "output")
        for number, node in enumerate(output.args[0], len(self.inputs)):
            self._store(self.values[node], number, node)

    def _store(self, value: Any, number: int, node: fx.Node) -> None:
        if isinstance(value, _SumOfRows):
            self.program.sum_rows(value.of, number)
        else:
            self.program.store(value, number, _ctype(node))

    def _node(self, node: fx.Node) -> Any:
        if is_transparent(node):
            return self._read(node.args[0])
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.target in BY_ROW:
            rule: Callable[[fx.Node], Any] = getattr(self, f"_{BY_ROW[node.target]}")
            return rule(node)
        element = _elementwise(node)
        sources: list[Value] = []
        texts = []
        for argument in node.args:
            if isinstance(argument, fx.Node):
                texts.append(f"{{{len(sources)}}}")
                sources.append(self._read(argument))
            else:
                texts.append(_literal(argument))
        return self.program.apply(element.expression.format(*texts), *sources, ctype=_ctype(node))

    def _read(self, node: Any) -> Value:
        assert isinstance(node, fx.Node)
        if node in self.values:
            value = self.values[node]
            if not isinstance(value, Value):
                raise Unsupported(f"{node.name} is a sum over rows that the same group reads")
            return value
        x = g.value(node)
        kind = self._kind(x)
        if (node, kind) not in self.loads:
            self.loads[node, kind] = self.program.load(self.inputs[node], kind, _ctype(node))
        return self.loads[node, kind]

    def _kind(self, x: Tensor) -> str:
        last = x.shape[-1] if x.dim() else 1
        if x.numel() == 1:
            return "scalar"
        if x.numel() == self.rows * self.columns and last == self.columns:
            return "full"
        if x.numel() == self.columns and last == self.columns:
            return "row"
        if x.numel() == self.rows and last == 1:
            return "column"
        raise Unsupported(f"an input {list(x.shape)} among {self.rows} rows of {self.columns}")

    # ---- by row --------------------------------------------------------------------------------------------

    def _full(self, node: Any) -> Value:
        value = self._read(node)
        if value.kind != "full":
            raise Unsupported("a reduction of what is one number a row already")
        return value

    def _sum(self, node: fx.Node) -> Value:
        return self.program.reduce("sum", self._full(node.args[0]))

    def _mean(self, node: fx.Node) -> Value:
        return self.program.apply(f"({{0}} / T({self.columns}))", self._sum(node))

    def _max(self, node: fx.Node) -> Value:
        return self.program.reduce("max", self._full(node.args[0]))

    def _softmax(self, node: fx.Node) -> Value:
        p, x = self.program, self._full(node.args[0])
        power = p.apply("f_exp({0} - {1})", x, p.reduce("max", x))
        return p.apply("({0} * {1})", power, p.apply("(T(1) / {0})", p.reduce("sum", power)))

    def _log_softmax(self, node: fx.Node) -> Value:
        p, x = self.program, self._full(node.args[0])
        shifted = p.apply("({0} - {1})", x, p.reduce("max", x))
        total = p.reduce("sum", p.apply("f_exp({0})", shifted))
        return p.apply("({0} - {1})", shifted, p.apply("std::log({0})", total))

    def _softmax_backward(self, node: fx.Node) -> Value:
        p, d, y = self.program, self._full(node.args[0]), self._full(node.args[1])
        return p.apply("({1} * ({0} - {2}))", d, y, p.reduce("sum", p.apply("({0} * {1})", d, y)))

    def _log_softmax_backward(self, node: fx.Node) -> Value:
        p, d, y = self.program, self._full(node.args[0]), self._full(node.args[1])
        return p.apply("({0} - f_exp({1}) * {2})", d, y, p.reduce("sum", d))

    def _layer_norm(self, node: fx.Node) -> tuple[Value, Value, Value]:
        x_node, _, weight, bias, eps = node.args
        p, x, n = self.program, self._full(x_node), self.columns
        mean = p.apply(f"({{0}} / T({n}))", p.reduce("sum", x))
        centred = p.apply("({0} - {1})", x, mean)
        square = p.reduce("sum", p.apply("({0} * {0})", centred))
        inverse = p.apply(f"(T(1) / std::sqrt({{0}} / T({n}) + {_literal(eps)}))", square)
        normed = p.apply("({0} * {1})", centred, inverse)
        if weight is not None:
            normed = p.apply("({0} * {1})", normed, self._read(weight))
        if bias is not None:
            normed = p.apply("({0} + {1})", normed, self._read(bias))
        return normed, mean, inverse

    def _layer_norm_backward(self, node: fx.Node) -> tuple[Any, Any, Any]:
        d_node, x_node, _, mean_node, inverse_node, weight, *_ = node.args
        p, d, x, n = self.program, self._full(d_node), self._full(x_node), self.columns
        mean, inverse = self._read(mean_node), self._read(inverse_node)
        normed = p.apply("(({0} - {1}) * {2})", x, mean, inverse)
        weighted = d if weight is None else p.apply("({0} * {1})", d, self._read(weight))
        first = p.apply(f"({{0}} / T({n}))", p.reduce("sum", weighted))
        second = p.apply(f"({{0}} / T({n}))", p.reduce("sum", p.apply("({0} * {1})", weighted, normed)))
        d_x = p.apply("(({0} - {1} - {2} * {3}) * {4})", weighted, first, normed, second, inverse)
        return d_x, _SumOfRows(p.apply("({0} * {1})", d, normed)), _SumOfRows(d)


class _SumOfRows:
    """The sum over all rows of a value, [columns]: it is there only when the last row is done."""

    def __init__(self, of: Value):
        self.of = of


def _elementwise(node: fx.Node) -> Elementwise:
    approximate = str(node.kwargs.get("approximate", "none"))
    if node.target is aten.gelu.default:
        return GELU[approximate]
    if node.target is aten.gelu_backward.default:
        return GELU_BACKWARD[approximate]
    return ELEMENTWISE[node.target]


def _ctype(node: fx.Node) -> str:
    return "bool" if g.value(node).dtype == torch.bool else "T"


def _literal(number: Any) -> str:
    """A Python number in C++."""
    if isinstance(number, bool):
        return str(number).lower()
    if math.isnan(number):
        return "std::numeric_limits<T>::quiet_NaN()"
    if math.isinf(number):
        return f"({'-' if number < 0 else ''}std::numeric_limits<T>::infinity())"
    return f"T({float(number)!r})"
