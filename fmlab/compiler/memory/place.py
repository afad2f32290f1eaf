"""A graph run in one block of memory: every intermediate that can be told where to go gets its slice.

The block is taken once a call and given back at its end. What the caller gets lives longer than that and is
left to the allocator, as is what an operator cannot write to a given place: `unplaced` says which and why.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fmlab.compiler import graph as g
from fmlab.compiler.fusion.kernel import FusedKernel
from fmlab.compiler.memory.plan import ALIGNMENT, Lifetime, MemoryPlan, handed, lifetimes, place
from fmlab.compiler.runner import Runner

aten = torch.ops.aten
_COPIES = (aten.clone.default, aten._to_copy.default)
_ZEROS = (aten.new_zeros.default, aten.zeros_like.default)
#: These take a number where their operator with out= takes a tensor; torch's functions take either.
_NUMBERS: dict[Any, Any] = {
    aten.add.Scalar: torch.add,
    aten.sub.Scalar: torch.sub,
    aten.mul.Scalar: torch.mul,
    aten.div.Scalar: torch.div,
}
CALLER = "the caller gets it, or the backward graph"


class PlacedRunner(Runner):
    """Runs a graph as Runner does, with its intermediates in one block.

    Attributes: plan: the lifetimes and places of what lies in the block. unplaced: the other nodes that make
    memory, and why. block: its bytes. peak: of the block and what is alive outside of it, at any step.
    """

    def __init__(self, module: fx.GraphModule):
        nodes = list(module.graph.nodes)
        every = lifetimes(nodes)
        results = handed(nodes)
        self.unplaced: dict[str, str] = {}
        self._slots: dict[tuple[str, int], Lifetime] = {}
        self._outs: dict[fx.Node, _Way] = {}
        for (node, index), life in every.items():
            way = way_to_write(node)
            if isinstance(way, str):
                self.unplaced[node.name] = way
                continue
            self._outs[node] = way
            if (node, index) in results:
                self.unplaced[_label(node, index)] = CALLER
            else:
                self._slots[node.name, index] = life
        inside = list(self._slots.values())
        outside = [life for key, life in every.items() if (key[0].name, key[1]) not in self._slots]
        place(inside)
        live = [_alive(inside, step) for step in range(len(nodes))]
        self.plan = MemoryPlan(inside, live, [node.name for node in nodes])
        self.block = -(-self.plan.block // ALIGNMENT) * ALIGNMENT
        self.peak = self.block + max((_alive(outside, step) for step in range(len(nodes))), default=0)
        super().__init__(module)

    def __call__(self, inputs: list[Any]) -> Any:
        with torch.no_grad():
            return super().__call__(inputs)

    def _lines(self, module: fx.GraphModule) -> list[str]:
        lines = super()._lines(module)
        if self._slots:  # which may all be empty
            lines.insert(3, f"    block_ = {self._constant(_block)}({self.block})")
        return lines

    def _call(self, node: fx.Node) -> str:
        way = self._outs.get(node)
        results = [x for x in _results(node) if isinstance(x, Tensor)]
        if way is None or not any((node.name, index) in self._slots for index in range(len(results))):
            return super()._call(node)
        outs = [self._out(node, index, x) for index, x in enumerate(results)]
        arguments = [self._text(a) for a in node.args]
        if way.kind == "kernel":
            return f"{self._constant(node.target.code)}([{', '.join(arguments)}], [{', '.join(outs)}])"  # type: ignore[union-attr]
        if way.kind == "copy":
            return f"{outs[0]}.copy_({arguments[0]})"
        if way.kind == "zero":
            return f"{outs[0]}.zero_()"
        arguments += [f"{key}={self._text(a)}" for key, a in node.kwargs.items()]
        arguments += [f"{name}={out}" for name, out in zip(way.names, outs, strict=True)]
        return f"{self._constant(way.target)}({', '.join(arguments)})"

    def _out(self, node: fx.Node, index: int, x: Tensor) -> str:
        """The text of a place for a result: in the block, on an input, or new."""
        if index in (over := node.meta.get("overwrites", {})):
            return self._over(node, over[index], x)
        shape, stride, dtype = tuple(x.shape), tuple(x.stride()), x.dtype
        if (life := self._slots.get((node.name, index))) is None:
            new = self._constant(lambda: torch.empty_strided(shape, stride, dtype=dtype))
            return f"{new}()"
        start = life.offset // dtype.itemsize
        return f"{self._constant(lambda block: block.view(dtype).as_strided(shape, stride, start))}(block_)"


class _Way:
    """How a node can be told where to write: "kernel", "copy", "zero" or "out"."""

    def __init__(self, kind: str, target: Any = None, names: tuple[str, ...] = ()):
        self.kind, self.target, self.names = kind, target, names


def way_to_write(node: fx.Node) -> _Way | str:
    """How a node writes to a given place; or why it cannot."""
    if isinstance(node.target, FusedKernel):
        return "a group without generated code" if node.target.code is None else _Way("kernel")
    if node.target in _COPIES:
        return _Way("copy")
    if node.target in _ZEROS:
        return _Way("zero")
    if node.target in _NUMBERS:
        return _Way("out", _NUMBERS[node.target], ("out",))
    if not isinstance(node.target, OpOverload):
        return "not an operator"
    results = [x for x in _results(node) if isinstance(x, Tensor)]
    packet = node.target.overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)
        writes = [a for a in other._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        plain = [(a.name, str(a.type)) for a in other._schema.arguments if a not in writes]
        same = plain == [(a.name, str(a.type)) for a in node.target._schema.arguments]
        names = tuple(a.name for a in writes)
        if same and len(names) == len(results) and all(a.kwarg_only for a in writes):
            # those made by torch's code generator call the plain operator and copy: two tensors, not one
            if torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CPU"):
                return _Way("out", other, names)
            return "its out= variant makes a tensor of its own and copies it"
    return "no out= variant"


def _results(node: fx.Node) -> list[Any]:
    result = g.value(node)
    return list(result) if isinstance(result, tuple | list) else [result]


def _alive(lives: list[Lifetime], step: int) -> int:
    return sum(one.nbytes for one in lives if one.birth <= step <= one.death)


def _label(node: fx.Node, index: int) -> str:
    return node.name if len(_results(node)) == 1 else f"{node.name}[{index}]"


def _block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
