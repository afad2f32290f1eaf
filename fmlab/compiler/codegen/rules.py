"""What each operator that reduces becomes: steps over a row, or over an image's group."""

from typing import TYPE_CHECKING, Any

from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.rows import RowProgram, Value
from fmlab.compiler.fusion.rows import is_sum_of_rows

EXP = 12  # additions that an exponential costs
LONG = 4096  # columns of a row that is read as few times as may be: it fills a core's nearest cache


class SumOfRows:
    """The sum over all rows of a value, [columns]: it is there only when the last row is done."""

    def __init__(self, of: Value):
        self.of = of


class Joined:
    """Full values side by side, [rows, parts * columns]: nothing in the group reads them so."""

    def __init__(self, parts: list[Value]):
        self.parts = parts


class Total:
    """A number that is there only when the last row is done: an expression of totals."""

    def __init__(self, expression: str):
        self.expression = expression


class Rules:
    """The rules, one for each operator in REDUCING; `_full`, `_load` and `_read` are the lowering's."""

    program: RowProgram
    columns: int
    values: dict[fx.Node, Any]
    hot: dict[Value, Value]

    if TYPE_CHECKING:

        def _full(self, node: Any) -> Value: ...

        def _load(self, node: fx.Node, kind: str) -> Value: ...

        def _read(self, node: Any) -> Value: ...

    # ---- by row --------------------------------------------------------------------------------------------

    def _sum(self, node: fx.Node) -> Any:
        if is_sum_of_rows(node):
            return SumOfRows(self._full(node.args[0]))
        return self.program.reduce("sum", self._full(node.args[0]))

    def _mean(self, node: fx.Node) -> Value:
        total = self.program.reduce("sum", self._full(node.args[0]))
        return self.program.apply(f"({{0}} / T({self.columns}))", total)

    def _max(self, node: fx.Node) -> Value:
        """The largest, or NaN if there is one: a vector's maximum loses it."""
        p, x = self.program, self._full(node.args[0])
        missing = p.reduce("sum", p.apply("({0} != {0} ? T(1) : T(0))", x))
        nan = "std::numeric_limits<T>::quiet_NaN()"
        return p.apply(f"({{1}} > T(0) ? {nan} : {{0}})", p.reduce("max", x), missing)

    def _softmax(self, node: fx.Node) -> Value:
        p, x = self.program, self._full(node.args[0])
        power = p.apply("f_exp_down({0} - {1})", x, p.reduce("max", x), flops=EXP)
        return p.apply("({0} * {1})", power, p.apply("(T(1) / {0})", p.reduce("sum", power)))

    def _log_softmax(self, node: fx.Node) -> Value:
        p, x = self.program, self._full(node.args[0])
        if self.columns > LONG and not p.groups:
            largest, total = p.log_sum(x)
            shifted = p.apply("({0} - {1})", x, largest)
        else:
            shifted = p.apply("({0} - {1})", x, p.reduce("max", x))
            total = p.reduce("sum", p.apply("f_exp_down({0})", shifted, flops=EXP))
        return p.apply("({0} - {1})", shifted, p.apply("std::log({0})", total))

    def _softmax_backward(self, node: fx.Node) -> Value:
        p, d, y = self.program, self._full(node.args[0]), self._full(node.args[1])
        return p.apply("({1} * ({0} - {2}))", d, y, p.reduce("sum", p.apply("({0} * {1})", d, y)))

    def _log_softmax_backward(self, node: fx.Node) -> Value:
        p, d, y = self.program, self._full(node.args[0]), self._full(node.args[1])
        total = self.hot.get(d) or p.reduce("sum", d)  # of a row with one element that element
        return p.apply("({0} - f_exp_down({1}) * {2})", d, y, total, flops=EXP)

    # ---- a cross-entropy -----------------------------------------------------------------------------------

    def _label(self, node: Any, ignored: Any) -> tuple[Value, Value]:
        """A row's label, 0 where it does not count, and whether it counts. Others are refused."""
        assert isinstance(node, fx.Node)
        p, label = self.program, self._load(node, "column")
        counts = p.apply(f"({{0}} != {int(ignored)})", label, ctype="bool")
        outside = p.apply("({0} && ({1} < 0 || {1} >= C))", counts, label, ctype="bool")
        p.refuse(outside, f"a label is outside of 0..{self.columns - 1} and is not {int(ignored)}")
        at = p.apply("({0} && !{1} ? {2} : 0)", counts, outside, label, ctype="int64_t")
        return at, counts

    def _nll_loss(self, node: fx.Node) -> tuple[Total, Total]:
        scores, labels, _, reduction, ignored = node.args
        p, y = self.program, self._full(scores)
        at, counts = self._label(labels, ignored)
        loss = p.total(p.apply("({0} ? -{1} : T(0))", counts, p.pick(y, at)))
        rows = p.total(p.apply("({0} ? T(1) : T(0))", counts))
        return Total(f"{loss} / {rows}" if reduction == 1 else loss), Total(rows)

    def _nll_loss_backward(self, node: fx.Node) -> Value:
        d_loss, _, labels, _, reduction, ignored, rows = node.args
        p = self.program
        at, counts = self._label(labels, ignored)
        d, n = self._read(d_loss), self._read(rows)
        d = p.apply("(-{0} / {1})", d, n) if reduction == 1 else p.apply("(-{0})", d)
        d = p.apply("({0} ? {1} : T(0))", counts, d)
        one = p.apply("({0} == (int32_t){1} ? {2} : T(0))", p.columns(), at, d)
        self.hot[one] = d
        return one

    # ---- norms ---------------------------------------------------------------------------------------------

    def _layer_norm(self, node: fx.Node) -> tuple[Value, Value, Value]:
        x, _, weight, bias, eps = node.args
        return self._normed(self._full(x), self.columns, self._row(weight), self._row(bias), eps)

    def _group_norm(self, node: fx.Node) -> tuple[Value, Value, Value]:
        x, weight, bias, _, channels, pixels, groups, eps = node.args
        size = int(channels // groups * pixels)  # type: ignore[operator, arg-type]
        return self._normed(self._full(x), size, self._row(weight), self._row(bias), eps)

    def _layer_norm_backward(self, node: fx.Node) -> tuple[Any, Any, Any]:
        d, x, _, mean, inverse, weight, *_ = node.args
        moments = self._read(mean), self._read(inverse)
        return self._gradients(self._full(d), self._full(x), *moments, self._row(weight), self.columns)

    def _group_norm_backward(self, node: fx.Node) -> tuple[Any, Any, Any]:
        d, x, mean, inverse, weight, _, channels, pixels, groups, _ = node.args
        size = int(channels // groups * pixels)  # type: ignore[operator, arg-type]
        moments = self._grouped(mean), self._grouped(inverse)
        return self._gradients(self._full(d), self._full(x), *moments, self._row(weight), size)

    def _row(self, node: Any) -> Value | None:
        """A weight or bias of each column."""
        if node is None:
            return None
        return self._read(node) if node in self.values else self._load(node, "row")

    def _grouped(self, node: Any) -> Value:
        """A number of each image and group."""
        assert list(g.shape(node))[-1] == self.program.groups
        return self._load(node, "group")

    def _normed(
        self, x: Value, n: int, weight: Value | None, bias: Value | None, eps: Any
    ) -> tuple[Value, Value, Value]:
        """(x - mean) / sqrt(variance + eps) * weight + bias; the mean; 1 / sqrt(...). n: numbers of a sum."""
        p = self.program
        mean = p.apply(f"({{0}} / T({n}))", p.reduce("sum", x))
        centred = p.apply("({0} - {1})", x, mean)
        square = p.reduce("sum", p.apply("({0} * {0})", centred))
        inverse = p.apply(f"(T(1) / std::sqrt({{0}} / T({n}) + T({float(eps)!r})))", square)
        normed = p.apply("({0} * {1})", centred, inverse)
        if weight is not None:
            normed = p.apply("({0} * {1})", normed, weight)
        if bias is not None:
            normed = p.apply("({0} + {1})", normed, bias)
        return normed, mean, inverse

    def _gradients(
        self, d: Value, x: Value, mean: Value, inverse: Value, weight: Value | None, n: int
    ) -> tuple[Value, SumOfRows, SumOfRows]:
        """Gradients of x, weight and bias."""
        p = self.program
        normed = p.apply("(({0} - {1}) * {2})", x, mean, inverse)
        weighted = d if weight is None else p.apply("({0} * {1})", d, weight)
        first = p.apply(f"({{0}} / T({n}))", p.reduce("sum", weighted))
        second = p.apply(f"({{0}} / T({n}))", p.reduce("sum", p.apply("({0} * {1})", weighted, normed)))
        d_x = p.apply("(({0} - {1} - {2} * {3}) * {4})", weighted, first, normed, second, inverse)
        return d_x, SumOfRows(p.apply("({0} * {1})", d, normed)), SumOfRows(d)
