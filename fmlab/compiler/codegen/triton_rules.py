"""What each operator that reduces is in Triton: lines over a row, over an image's group, or over all rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.codegen.lower import Unsupported
from fmlab.compiler.fusion.rows import is_pixels

aten = torch.ops.aten


@dataclass(frozen=True)
class Value:
    """A name in the kernel, what it is in the space (see triton_lower), and whether it is a truth value."""

    name: str
    kind: str
    truth: bool = False


@dataclass(frozen=True)
class SumOfRows:
    """The sum over all rows of a value, [columns]: it is there only when the last row is done."""

    of: Value


@dataclass(frozen=True)
class Joined:
    """Full values side by side, [rows, parts * columns]: nothing in the group reads them so."""

    parts: list[Value]


@dataclass(frozen=True)
class Total:
    """A sum over the whole space, by its number, divided by another one if there is one."""

    of: int
    over: int | None = None


class Rules:
    """The rules; what is under TYPE_CHECKING is the lowering's."""

    if TYPE_CHECKING:
        rows: int
        columns: int
        _read: Callable[[Any], Value]
        _full: Callable[[Any], Value]
        _load: Callable[..., Value]
        _let: Callable[..., Value]
        _total: Callable[[str], int]

    def _row(self, name: str, expression: str, full: str) -> Value:
        """A number a row: `expression` with the sum of `full` over the row as {0}."""
        return self._let(name, expression.format(f"f_row_sum({full}, inside)"), "column")

    def _group(self, name: str, expression: str, full: str) -> Value:
        """A number of an image and a group of its channels, likewise."""
        return self._let(name, expression.format(f"f_tile_sum({full}, inside)"), "group")

    # ---- by row --------------------------------------------------------------------------------------------

    def _sum(self, node: fx.Node) -> Any:
        x, dims = g.value(node.args[0]), node.args[1]
        over = {int(dim) % x.dim() for dim in dims}  # type: ignore[union-attr, arg-type]
        columns = 1 if is_pixels(x) else x.dim() - 1
        if over == set(range(x.dim())) - {columns}:
            return SumOfRows(self._full(node.args[0]))
        if over != {columns}:
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

    # ---- a cross-entropy -----------------------------------------------------------------------------------

    def _label(self, node: Any, ignored: Any) -> tuple[str, str]:
        """A row's label, and whether it counts; none does behind the last row."""
        label = self._load(node, "column", other=str(int(ignored))).name
        return label, self._let("counts", f"{label} != {int(ignored)}", "column", True).name

    def _nll_loss(self, node: fx.Node) -> tuple[Total, Total]:
        scores, labels, _, reduction, ignored = node.args
        y = self._full(scores).name
        label, counts = self._label(labels, ignored)
        picked = self._row("picked", "{0}", f"tl.where(at == {label}, {y}, 0.0)").name
        known = f"({label} >= 0) & ({label} < COLUMNS)"  # another gives nan, so that it cannot go unseen
        loss = self._let("loss", f'tl.where({known}, {picked} * (-1.0), float("nan"))', "column").name
        lost = self._total(f"tl.where({counts}, {loss}, 0.0)")
        rows = self._total(f"tl.where({counts}, 1.0, 0.0)")
        return Total(lost, rows if reduction == 1 else None), Total(rows)

    def _nll_loss_backward(self, node: fx.Node) -> Value:
        d_node, _, labels, _, reduction, ignored, rows = node.args
        label, counts = self._label(labels, ignored)
        d_loss = self._read(d_node).name + " * (-1.0)"
        d_loss += f" / {self._read(rows).name}" if reduction == 1 else ""
        return self._let("d_scores", f"tl.where(({label} == at) & {counts}, {d_loss}, 0.0)", "full")

    # ---- norms ---------------------------------------------------------------------------------------------

    def _layer_norm(self, node: fx.Node) -> tuple[Value, Value, Value]:
        x, _, weight, bias, eps = node.args
        return self._normed(self._full(x).name, self._row, "COLUMNS", weight, bias, eps)

    def _group_norm(self, node: fx.Node) -> tuple[Value, Value, Value]:
        x, weight, bias, *_, eps = node.args
        return self._normed(self._full(x).name, self._group, "(SIZE * PIXELS)", weight, bias, eps)

    def _normed(
        self, x: str, sums: Callable[..., Value], n: str, weight: Any, bias: Any, eps: Any
    ) -> tuple[Value, Value, Value]:
        """(x - mean) / sqrt(variance + eps) * weight + bias; the mean; 1 / sqrt(...). n: numbers of a sum."""
        mean = sums("mean", f"{{0}} / {n}", x)
        centred = self._let("centred", f"{x} - {mean.name}", "full").name
        rstd = sums("rstd", f"1 / tl.sqrt({{0}} / {n} + {float(eps)!r})", f"{centred} * {centred}")
        normed = f"{centred} * {rstd.name}"
        if weight is not None:
            normed += f" * {self._weight(weight).name}"
        if bias is not None:
            normed += f" + {self._weight(bias).name}"
        return self._let("normed", normed, "full"), mean, rstd

    def _layer_norm_backward(self, node: fx.Node) -> tuple[Any, Any, Any]:
        d, x, _, mean, rstd, weight, *_ = node.args
        moments = self._read(mean).name, self._read(rstd).name
        return self._gradients(node, d, x, moments, self._row, "COLUMNS", weight)

    def _group_norm_backward(self, node: fx.Node) -> tuple[Any, Any, Any]:
        d, x, mean, rstd, weight, *_ = node.args
        moments = self._load(mean, "group").name, self._load(rstd, "group").name
        return self._gradients(node, d, x, moments, self._group, "(SIZE * PIXELS)", weight)

    def _gradients(
        self, node: fx.Node, d_node: Any, x_node: Any, moments: tuple[str, str], sums: Callable[..., Value],
        n: str, weight: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Gradients of x, weight and bias."""
        d, x, (mean, rstd) = self._full(d_node), self._full(x_node).name, moments
        normed = self._let("normed", f"({x} - {mean}) * {rstd}", "full").name
        pull = d.name
        if weight is not None:
            pull = self._let("pull", f"{d.name} * {self._weight(weight).name}", "full").name
        shift = sums("shift", f"{{0}} / {n}", pull).name
        stretch = sums("stretch", f"{{0}} / {n}", f"{pull} * {normed}").name
        d_x = self._let("d_x", f"{rstd} * ({pull} - {shift} - {normed} * {stretch})", "full")
        wanted = {user.args[1] for user in node.users}
        d_weight = self._let("d_weight", f"{d.name} * {normed}", "full") if 1 in wanted else d_x
        return d_x, SumOfRows(d_weight), SumOfRows(d)

    def _weight(self, node: Any) -> Value:
        """A weight or bias of each column."""
        return self._load(node, "row") if node.op == "placeholder" else self._read(node)
