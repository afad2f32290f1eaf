"""From the operators of a fused group to the text of a Triton kernel.

A program of the kernel holds a tile of rows and columns of the group's space. What is one number a column (a
"row", such as a bias) or one number a row (a "column", such as a mean) is loaded as that, and broadcast:

    full [TILE, BLOCK]     row [1, BLOCK]     column [TILE, 1]     scalar []

Three shapes of kernel: an elementwise group has a program for each tile; a group that reduces over rows has
tiles as wide as a row, so that the row is loaded once; and one that adds up over all rows as well (the
gradients of a norm's weights) has few programs, each of which walks over many tiles and stores one sum.
"""

import keyword
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.lower import Unsupported
from fmlab.compiler.codegen.triton_maths import EXPRESSIONS, GELU, GELU_BACKWARD, LOGICAL
from fmlab.compiler.fusion.kernel import FusedKernel
from fmlab.compiler.fusion.operators import BY_ROW
from fmlab.compiler.fusion.rows import is_transparent

aten = torch.ops.aten
#: dtypes in memory, by that of the arithmetic on them
ARITHMETIC = {
    "tl.float32": {torch.float32, torch.bfloat16, torch.float16},
    "tl.float64": {torch.float64},
}
HALVES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
#: Names that the kernel's own text uses.
TAKEN = {"row", "at", "inside", "program", "start", "tl", "triton", "kernel", "float", "range"}


@dataclass(frozen=True)
class Value:
    """A name in the kernel, what it is in the space (see above), and whether it is a truth value."""

    name: str
    kind: str
    truth: bool = False


@dataclass
class Lowered:
    """A group as lines of a kernel.

    dtype: of the arithmetic. reads, writes: (number, kind) of inputs and outputs, counted together in the
    group's order; a written "sum" is one over all rows, and sums has its name. loads: lines that are the same
    for all rows; body: the others. whole: whether a tile must hold whole rows.
    """

    dtype: str
    reads: list[tuple[int, str]] = field(default_factory=list)
    writes: list[tuple[int, str]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    whole: bool = False


def lower(kernel: FusedKernel) -> Lowered:
    """The lines of a group. Raises Unsupported, which says why, for what no kernel is generated for."""
    return _Lowering(kernel).lowered


class _Lowering:
    def __init__(self, kernel: FusedKernel):
        self.rows, self.columns = kernel.space
        nodes = list(kernel.graph.nodes)
        self.lowered = Lowered(_arithmetic(nodes))
        self.names: set[str] = set()
        self.inputs = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
        self.values: dict[fx.Node, Any] = {}
        for node in nodes:
            if node.op == "call_function":
                self.values[node] = self._node(node)
        output = next(node for node in nodes if node.op == "output")
        for number, node in enumerate(output.args[0], len(self.inputs)):
            self._store(self.values[node], number, node)

    # ---- loads and stores ----------------------------------------------------------------------------------

    def _read(self, node: Any) -> Value:
        assert isinstance(node, fx.Node)
        if node not in self.values:
            self.values[node] = self._load(node)
        value = self.values[node]
        if not isinstance(value, Value):
            raise Unsupported(f"{node.name} is a sum over rows that the same group reads")
        return value

    def _load(self, node: fx.Node) -> Value:
        number, x = self.inputs[node], g.value(node)
        kind, name = self._kind(x), f"in{number}"
        where = {
            "full": "row * COLUMNS + at, mask=inside, other=0",
            "row": "at, mask=at < COLUMNS, other=0",
            "column": "row, mask=row < ROWS, other=0",
            "scalar": "0",
        }[kind]
        lines = self.lowered.body if kind in ("full", "column") else self.lowered.loads
        wide = f".to({self.lowered.dtype})" if x.dtype in HALVES else ""
        lines.append(f"{name} = tl.load({name}_ptr + {where}){wide}")
        self.lowered.reads.append((number, kind))
        return Value(name, kind, x.dtype == torch.bool)

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

    def _store(self, value: Any, number: int, node: fx.Node) -> None:
        name = f"out{number - len(self.inputs)}"
        if isinstance(value, _SumOfRows):
            total, one = f"{name}_sum", value.of.name
            self.lowered.sums.append(total)
            self.lowered.body.append(
                f"{total} += tl.sum(tl.where(inside, {one}, 0.0), axis=0, keep_dims=True)"
            )
            self.lowered.writes.append((number, "sum"))
            return
        x = g.value(node)
        full = x.numel() == self.rows * self.columns and (x.shape[-1] if x.dim() else 1) == self.columns
        if not full and value.kind not in ("column", "scalar"):
            raise Unsupported(f"a result {list(x.shape)} among {self.rows} rows of {self.columns}")
        where, mask = ("row * COLUMNS + at", "inside") if full else ("row", "row < ROWS")
        if full and value.kind == "scalar":
            raise Unsupported(f"{node.name} is one number, written everywhere")
        self.lowered.body.append(f"tl.store({name}_ptr + {where}, {value.name}, mask={mask})")
        self.lowered.writes.append((number, "full" if full else "column"))

    # ---- elementwise ---------------------------------------------------------------------------------------

    def _node(self, node: fx.Node) -> Any:
        widens = node.target is aten._to_copy.default and g.value(node).dtype not in HALVES
        if is_transparent(node) or node.target is aten.clone.default or widens:
            return self._read(node.args[0])
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.target in BY_ROW:
            self.lowered.whole = True
            rule: Callable[[fx.Node], Any] | None = getattr(self, f"_{BY_ROW[node.target]}", None)
            if rule is None:
                raise Unsupported(f"no Triton for {g.name(node)}")
            return rule(node)
        if node.target is aten._to_copy.default and (half := HALVES.get(g.value(node).dtype)):
            x = self._read(node.args[0])
            return self._let("rounded", f"{x.name}.to({half}).to({self.lowered.dtype})", x.kind)
        return self._elementwise(node)

    def _elementwise(self, node: fx.Node) -> Value:
        truth = g.value(node).dtype == torch.bool
        if truth and node.target not in LOGICAL:
            raise Unsupported(f"{g.name(node)} of truth values")
        sources: list[Value] = []
        texts = []
        for argument in node.args:
            if not isinstance(argument, fx.Node):
                texts.append(_literal(argument))
                continue
            value = self._read(argument)
            sources.append(value)
            as_number = value.truth and node.target not in LOGICAL
            texts.append(f"{value.name}.to({self.lowered.dtype})" if as_number else value.name)
        kinds = {source.kind for source in sources} - {"scalar"}
        kind = "full" if len(kinds) > 1 else (kinds or {"scalar"}).pop()
        return self._let(g.name(node), _expression(node).format(*texts), kind, truth)

    def _let(self, name: str, expression: str, kind: str, truth: bool = False) -> Value:
        """A line `name = expression`; the name gets a number where it is taken."""
        name = wanted = name.strip("_") or "value"
        number = 0
        while name in self.names or name in TAKEN or keyword.iskeyword(name):
            number += 1
            name = f"{wanted}_{number}"
        self.names.add(name)
        self.lowered.body.append(f"{name} = {expression}")
        return Value(name, kind, truth)

    # ---- by row --------------------------------------------------------------------------------------------

    def _full(self, node: Any) -> Value:
        value = self._read(node)
        if value.kind != "full":
            raise Unsupported("a reduction of what is one number a row already")
        return value

    def _row(self, name: str, expression: str, full: str) -> Value:
        """A number a row: `expression` with a reduction of `full` as {0}."""
        return self._let(name, expression.format(f"f_row_sum({full}, inside)"), "column")

    def _sum(self, node: fx.Node) -> Any:
        x, dims = g.value(node.args[0]), node.args[1]
        over = {int(dim) % x.dim() for dim in dims}  # type: ignore[union-attr, arg-type]
        if over == set(range(x.dim() - 1)):
            return _SumOfRows(self._full(node.args[0]))
        if over != {x.dim() - 1}:
            raise Unsupported(f"a sum over dims {sorted(over)} of {x.dim()}")
        return self._row("total", "{0}", self._full(node.args[0]).name)

    def _mean(self, node: fx.Node) -> Value:
        return self._row("mean", "{0} / COLUMNS", self._full(node.args[0]).name)

    def _max(self, node: fx.Node) -> Value:
        return self._let("largest", f"f_row_max_or_nan({self._full(node.args[0]).name}, inside)", "column")

    def _softmax(self, node: fx.Node) -> Value:
        x = self._full(node.args[0]).name
        power = self._let("power", f"tl.exp({x} - f_row_max({x}, inside))", "full").name
        return self._let("softmax", f"{power} / f_row_sum({power}, inside)", "full")

    def _log_softmax(self, node: fx.Node) -> Value:
        x = self._full(node.args[0]).name
        shifted = self._let("shifted", f"{x} - f_row_max({x}, inside)", "full").name
        return self._let("log_softmax", f"{shifted} - tl.log(f_row_sum(tl.exp({shifted}), inside))", "full")

    def _softmax_backward(self, node: fx.Node) -> Value:
        d, y = self._full(node.args[0]).name, self._full(node.args[1]).name
        pull = self._row("pull", "{0}", f"{d} * {y}").name
        return self._let("d_softmax", f"{y} * ({d} - {pull})", "full")

    def _log_softmax_backward(self, node: fx.Node) -> Value:
        d, y = self._full(node.args[0]).name, self._full(node.args[1]).name
        pull = self._row("pull", "{0}", d).name
        return self._let("d_log_softmax", f"{d} - tl.exp({y}) * {pull}", "full")

    def _layer_norm(self, node: fx.Node) -> tuple[Value, Value, Value]:
        x_node, _, weight, bias, eps = node.args
        x = self._full(x_node).name
        mean = self._row("mean", "{0} / COLUMNS", x)
        centred = self._let("centred", f"{x} - {mean.name}", "full").name
        spread = f"{{0}} / COLUMNS + {_literal(eps)}"
        rstd = self._row("rstd", f"1 / tl.sqrt({spread})", f"{centred} * {centred}")
        normed = f"{centred} * {rstd.name}"
        if weight is not None:
            normed += f" * {self._read(weight).name}"
        if bias is not None:
            normed += f" + {self._read(bias).name}"
        return self._let("layer_norm", normed, "full"), mean, rstd

    def _layer_norm_backward(self, node: fx.Node) -> tuple[Any, Any, Any]:
        d_node, x_node, _, mean_node, rstd_node, weight, *_ = node.args
        d, x = self._full(d_node).name, self._full(x_node).name
        mean, rstd = self._read(mean_node).name, self._read(rstd_node).name
        normed = self._let("normed", f"({x} - {mean}) * {rstd}", "full").name
        pull = d if weight is None else self._let("pull", f"{d} * {self._read(weight).name}", "full").name
        shift = self._row("shift", "{0} / COLUMNS", pull).name
        stretch = self._row("stretch", "{0} / COLUMNS", f"{pull} * {normed}").name
        d_x = self._let("d_x", f"{rstd} * ({pull} - {shift} - {normed} * {stretch})", "full")
        wanted = {user.args[1] for user in node.users}
        d_weight = self._let("d_weight", f"{d} * {normed}", "full") if 1 in wanted else d_x
        return d_x, _SumOfRows(d_weight), _SumOfRows(self._full(d_node))


class _SumOfRows:
    """The sum over all rows of a value, [columns]: it is there only when the last row is done."""

    def __init__(self, of: Value):
        self.of = of


def _arithmetic(nodes: list[fx.Node]) -> str:
    """The dtype that a group computes in. Raises Unsupported for a mix, and for memory in another order."""
    values = [x for node in nodes for x in g.tensors(node)]
    if any(not x.is_contiguous() for x in values):
        raise Unsupported("memory in another order than the plain one")
    dtypes = {x.dtype for x in values} - {torch.bool}
    for name, allowed in ARITHMETIC.items():
        if dtypes and dtypes <= allowed:
            return name
    raise Unsupported(f"dtypes {sorted(map(str, dtypes))}: float64 alone, or fp32, bf16 and fp16")


def _expression(node: fx.Node) -> str:
    approximate = str(node.kwargs.get("approximate", "none"))
    if node.target is aten.gelu.default:
        return GELU[approximate]
    if node.target is aten.gelu_backward.default:
        return GELU_BACKWARD[approximate]
    if node.target not in EXPRESSIONS:
        raise Unsupported(f"no Triton for {g.name(node)}")
    return EXPRESSIONS[node.target]


def _literal(number: Any) -> str:
    """A Python number in a kernel: its dtype is that of the tensor which it meets."""
    if isinstance(number, bool | int) or math.isfinite(number):
        return repr(number) if number >= 0 else f"({number!r})"
    return 'float("nan")' if math.isnan(number) else f'({"-" if number < 0 else ""}float("inf"))'
