"""From the operators of a fused group to the text of a Triton kernel.

A program of the kernel holds a tile of rows and columns of the group's space. What is one number a column (a
"row", such as a bias) or one number a row (a "column", such as a mean) is loaded as that, and broadcast:

    full [TILE, BLOCK]     row [1, BLOCK]     column [TILE, 1]     scalar []

A "part" is full as well, of rows that are parts of wider ones, and "2 parts" are full values written side by
side to the rows of one result.

Of images in channels_last memory the rows are pixels and the columns channels; an "image" is one number of
each image and channel, a "group" one of each image and group of channels.

Four shapes of kernel: an elementwise group has a program for each tile; one that reduces over rows has tiles
as wide as a row, so that the row is loaded once; one that adds up over all rows as well (the gradients of a
norm's weights) has few programs, each of which walks over many tiles and stores one sum; and one that
normalises groups of channels has a program for each image and group.
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
from fmlab.compiler.codegen.lower import Unsupported, images_of
from fmlab.compiler.codegen.triton_maths import EXPRESSIONS, GELU, GELU_BACKWARD, LOGICAL
from fmlab.compiler.codegen.triton_rules import Joined, Rules, SumOfRows, Total, Value
from fmlab.compiler.fusion.kernel import FusedKernel
from fmlab.compiler.fusion.operators import JOINING, REDUCING
from fmlab.compiler.fusion.rows import is_pixels, is_transparent, laid_out, pitch

aten = torch.ops.aten
#: dtypes in memory, by that of the arithmetic on them
ARITHMETIC = {
    "tl.float32": {torch.float32, torch.bfloat16, torch.float16},
    "tl.float64": {torch.float64},
}
HALVES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
#: Names that the kernel's own text uses.
TAKEN = {
    *("row", "at", "down", "across", "inside", "program", "start", "image", "group", "pixel", "channel"),
    *("tl", "triton", "kernel", "float", "range"),
}
GROUP = "image * tl.num_programs(1) + group"


@dataclass
class Lowered:
    """A group as lines of a kernel.

    dtype: of the arithmetic. reads, writes: (number, kind) of inputs and outputs, counted together in the
    group's order; a written "sum" is one over all rows, and sums has its name. loads: lines that are the same
    for all rows; body: the others. whole: whether a tile must hold whole rows. totals: names of sums over the
    whole space, one a program; ends: (number, total) of outputs made of them. widths: from a
    row of a part to the next, by the name that the kernel gets it under. pixels: of an image; groups: of
    an image's channels, where they are normalised, else 0.
    """

    dtype: str
    pixels: int
    groups: int
    reads: list[tuple[int, str]] = field(default_factory=list)
    writes: list[tuple[int, str]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    totals: list[str] = field(default_factory=list)
    ends: list[tuple[int, Total]] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    whole: bool = False

    @property
    def walks(self) -> bool:
        """Whether a program walks over many tiles, to add up."""
        return bool(self.sums or self.totals) and not self.groups


def lower(kernel: FusedKernel) -> Lowered:
    """The lines of a group. Raises Unsupported, which says why, for what no kernel is generated for."""
    return _Lowering(kernel).lowered


class _Lowering(Rules):
    def __init__(self, kernel: FusedKernel):
        self.rows, self.columns = kernel.space
        nodes = list(kernel.graph.nodes)
        self.lowered = Lowered(_arithmetic(nodes), *images_of(nodes))
        self.names: set[str] = set()
        self.inputs = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
        self.values: dict[fx.Node, Any] = {}
        for node in nodes:
            if node.op == "call_function":
                self.values[node] = self._node(node)
        output = next(node for node in nodes if node.op == "output")
        for number, node in enumerate(output.args[0], len(self.inputs)):
            self._store(self.values[node], number, node)
        if self.lowered.sums or self.lowered.totals:
            self.lowered.whole = True

    # ---- loads and stores ----------------------------------------------------------------------------------

    def _read(self, node: Any, like: Tensor | None = None) -> Value:
        """The value of a node; like: what is walked over, where that tells how an input is read."""
        assert isinstance(node, fx.Node)
        if node.op == "placeholder" and node not in self.values:
            return self._load(node, self._kind(g.value(node), like))
        value = self.values[node]
        if not isinstance(value, Value):
            raise Unsupported(f"{node.name} is a sum over rows that the same group reads")
        return value

    def _full(self, node: Any) -> Value:
        value = self._read(node)
        if value.kind != "full":
            raise Unsupported("a reduction of what is one number a row already")
        return value

    def _load(self, node: fx.Node, kind: str, other: str = "0") -> Value:
        """An input, read as `kind`, with `other` outside of the space."""
        if node in self.values:
            known = self.values[node]
            if known.kind != kind:
                raise Unsupported(f"{node.name} is read as a {known.kind} and as a {kind}")
            return known
        number, x = self.inputs[node], g.value(node)
        name = f"in{number}"
        if (apart := pitch(x)) is not None:
            if kind != "full":
                raise Unsupported(f"{node.name} is part of wider rows and read as a {kind}")
            kind = "part"
            self.lowered.widths[f"WIDTH{number}"] = apart
        grouped = self.lowered.groups > 0
        image = (
            "image * COLUMNS + at, mask=across" if grouped else "row // PIXELS * COLUMNS + at, mask=inside"
        )
        where = {
            "full": f"row * COLUMNS + at, mask=inside, other={other}",
            "part": f"row * WIDTH{number} + at, mask=inside, other={other}",
            "row": f"at, mask=across, other={other}",
            "column": f"row, mask=down, other={other}",
            "image": f"{image}, other={other}",
            "group": GROUP,
            "scalar": "0",
        }[kind]
        lines = self.lowered.loads if kind in ("row", "scalar", "group") else self.lowered.body
        wide = f".to({self.lowered.dtype})" if x.dtype in HALVES else ""
        lines.append(f"{name} = tl.load({name}_ptr + {where}){wide}")
        self.lowered.reads.append((number, kind))
        self.values[node] = Value(name, "full" if kind == "part" else kind, x.dtype == torch.bool)
        return self.values[node]

    def _kind(self, x: Tensor, like: Tensor | None) -> str:
        if x.numel() == 1:
            return "scalar"
        if like is not None and is_pixels(like):
            n, c, h, w = like.shape
            shapes: dict[tuple[int, ...], str] = {
                (1, c, 1, 1): "row",
                (n, c, 1, 1): "image",
                (n, 1, h, w): "column",
            }
            if x.shape != like.shape and (kind := shapes.get((1,) * (4 - x.dim()) + tuple(x.shape))):
                return kind
        last = x.shape[-1] if x.dim() else 1
        if self._is_full(x):
            return "full"
        if x.numel() == self.columns and last == self.columns:
            return "row"
        if x.numel() == self.rows and last == 1:
            return "column"
        raise Unsupported(f"an input {list(x.shape)} among {self.rows} rows of {self.columns}")

    def _is_full(self, x: Tensor) -> bool:
        last = x.shape[1] if is_pixels(x) else x.shape[-1] if x.dim() else 1
        return x.numel() == self.rows * self.columns and last == self.columns

    def _store(self, value: Any, number: int, node: fx.Node) -> None:
        name, x, lines = f"out{number - len(self.inputs)}", g.value(node), self.lowered.body
        if isinstance(value, Total):
            self.lowered.ends.append((number, value))
            return
        if isinstance(value, SumOfRows):
            one = f"tl.sum(tl.where(inside, {value.of.name}, 0.0), axis=0, keep_dims=True)"
            total = f"{name}_sum"
            lines.append(f"{total} = {one}" if self.lowered.groups else f"{total} += {one}")
            self.lowered.sums.append(total)
            kind = "sum"
        elif isinstance(value, Joined):
            kind = f"{len(value.parts)} parts"
            for place, part in enumerate(value.parts):
                where = f"(row * {len(value.parts)} + {place}) * COLUMNS + at"
                lines.append(f"tl.store({name}_ptr + {where}, {part.name}, mask=inside)")
        elif value.kind == "group":
            kind = "group"
            lines.append(f"tl.store({name}_ptr + {GROUP}, tl.sum({value.name}))")  # of one number
        elif self._is_full(x) and value.kind != "scalar":
            kind = "full"
            lines.append(f"tl.store({name}_ptr + row * COLUMNS + at, {value.name}, mask=inside)")
        elif x.numel() == self.rows and value.kind == "column":
            kind = "column"
            lines.append(f"tl.store({name}_ptr + row, {value.name}, mask=down)")
        else:
            raise Unsupported(f"a result {list(x.shape)} among {self.rows} rows of {self.columns}")
        self.lowered.writes.append((number, kind))

    def _total(self, one: str) -> int:
        """The number of a new sum over all rows of a number a row, `one`, which is 0 behind the last row."""
        name = f"total{len(self.lowered.totals)}"
        self.lowered.totals.append(name)
        self.lowered.body.append(f"{name} += tl.sum({one}, axis=0, keep_dims=True)")
        return len(self.lowered.totals) - 1

    # ---- operators -----------------------------------------------------------------------------------------

    def _node(self, node: fx.Node) -> Any:
        same = is_transparent(node) or node.target is aten.clone.default
        half = HALVES.get(g.value(node).dtype) if node.target is aten._to_copy.default else None
        if same or (node.target is aten._to_copy.default and half is None):
            return self._read(node.args[0], g.value(node))
        if half is not None:
            x = self._read(node.args[0], g.value(node))
            return self._let("rounded", f"{x.name}.to({half}).to({self.lowered.dtype})", x.kind)
        if node.target is operator.getitem:
            if node.args[0] not in self.values:
                raise Unsupported(f"{node.name} is one of several results of an operator outside")
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.target in REDUCING:
            self.lowered.whole = True
            rule: Callable[[fx.Node], Any] = getattr(self, f"_{REDUCING[node.target]}")
            return rule(node)
        if node.target is JOINING:
            return Joined([self._full(part) for part in node.args[0]])  # type: ignore[union-attr]
        return self._elementwise(node)

    def _elementwise(self, node: fx.Node) -> Value:
        truth = g.value(node).dtype == torch.bool
        if truth and node.target not in LOGICAL:
            raise Unsupported(f"{g.name(node)} of truth values")
        kinds: set[str] = set()
        texts = []
        for argument in node.args:
            if not isinstance(argument, fx.Node):
                texts.append(_literal(argument))
                continue
            value = self._read(argument, g.value(node))
            kinds.add(value.kind)
            as_number = value.truth and node.target not in LOGICAL
            texts.append(f"{value.name}.to({self.lowered.dtype})" if as_number else value.name)
        kinds -= {"scalar"}
        kind = "full" if len(kinds) > 1 or "image" in kinds else (kinds or {"scalar"}).pop()
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


def _arithmetic(nodes: list[fx.Node]) -> str:
    """The dtype that a group computes in. Raises Unsupported for a mix, and for memory in another order."""
    values = [x for node in nodes for x in g.tensors(node)]
    if any(laid_out(x) is None for x in values):
        raise Unsupported("memory in another order than the plain one or channels_last")
    dtypes = {x.dtype for x in values} - {torch.bool, torch.int64}
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
