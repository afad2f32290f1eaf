"""A graph of operators as a static-shape compiler would run it: chains of pointwise operators as one kernel.

Operators are noted down until the host wants a result (or a step ends), as a lazy device does; only then is
it known which intermediate results anybody reads. Then, in the order of the program, each pointwise operator
joins the latest kernel that makes one of its inputs if both walk over as many elements, on the same stream;
so does a reduction, which ends its kernel: nothing joins through its result. A kernel reads each of its
inputs once, and writes only what another kernel reads or what is still alive when the graph ends.

Matrix products, convolutions, attention, gathers and scatters are kernels of their own; so is every fused
optimizer. `_foreach_` operators are taken apart into one operator for each tensor. Nothing else is modelled:
no layout changes, no fusion into matrix products, no reordering for memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fmlab.sim.charge import Cost, cost_of, tensors_in, touched_bytes
from fmlab.sim.memory import BLOCKS
from fmlab.sim.plan import Plan

#: A storage and how often it had been written: what an operator reads or makes.
Value = tuple[int, int]


@dataclass
class Node:
    """One operator of the graph.

    reads, writes: value -> bytes; kept: values of which a write leaves a part; size: elements that it walks
    over; info: whatever the caller wants back with the kernel.
    """

    name: str
    cost: Cost
    fusible: bool
    reduces: bool
    size: int
    stream: int
    reads: dict[Value, int] = field(default_factory=dict)
    writes: dict[Value, int] = field(default_factory=dict)
    kept: tuple[Value, ...] = ()
    shape: tuple[int, ...] = ()
    info: Any = None


@dataclass
class Kernel:
    """Operators that run as one. `cost` is filled when the graph is closed."""

    nodes: list[Node]
    cost: Cost = field(default_factory=lambda: Cost(0, 0, 0, ""))

    @property
    def name(self) -> str:
        """The operator, or all of a fused kernel in order."""
        if len(self.nodes) == 1:
            return self.nodes[0].name
        names = list(dict.fromkeys(node.name.partition("::")[2] for node in self.nodes))
        more = f", +{len(names) - 4}" if len(names) > 4 else ""
        return f"fused({', '.join(names[:4])}{more})"


class Graph:
    """Notes operators down and makes kernels of them."""

    def __init__(self) -> None:
        self.items: list[Node | Callable[[], None]] = []
        self._versions: dict[int, int] = {}

    def add(
        self,
        plan: Plan,
        cost: Cost,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        outputs: Any,
        stream: int,
        info: Any,
    ) -> None:
        """Note an operator that ran."""
        if plan.name.startswith("aten::_foreach_"):
            for parts in _taken_apart(plan, args, kwargs, outputs):
                single = cost_of(plan, parts[0], {}, tensors_in(parts[0]), parts[1])
                self._note(plan, single, parts[0], {}, tensors_in(parts[0]), parts[1], stream, info)
        else:
            self._note(plan, cost, args, kwargs, inputs, outputs, stream, info)

    def _note(
        self,
        plan: Plan,
        cost: Cost,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        outputs: Any,
        stream: int,
        info: Any,
    ) -> None:
        foreach = plan.name.startswith("aten::_foreach_")
        reduces = plan.reduction or "norm" in plan.name
        fusible = (plan.pointwise or plan.reduction or foreach) and cost.flops == 0
        targets = [t for position in plan.mutates for t in tensors_in(_given(position, args, kwargs))]
        made = tensors_in(outputs)
        largest = max((*made, *targets, *(inputs if reduces else ())), key=Tensor.numel, default=None)
        node = Node(plan.name, cost, fusible, reduces, largest.numel() if largest is not None else 0, stream)
        node.info, node.shape = info, tuple(made[0].shape) if made else ()
        written = {id(target) for target in targets}
        for tensor in inputs:
            value = self._value(tensor)
            if value is not None and (plan.reads_target or id(tensor) not in written):
                node.reads[value] = max(node.reads.get(value, 0), touched_bytes(tensor))
        for target in targets:
            self._write(node, target)
        for tensor in made:
            if (value := self._value(tensor)) is not None and value not in node.writes:
                node.writes[value] = touched_bytes(tensor)
        self.items.append(node)

    def _write(self, node: Node, target: Tensor) -> None:
        old = self._value(target)
        if old is None:
            return
        block = BLOCKS[target.untyped_storage()._cdata]
        size = touched_bytes(target)
        if size < block.size:  # the rest stays, so the value before must be in memory
            node.kept = (*node.kept, old)
        self._versions[block.serial] = old[1] + 1
        node.writes[(block.serial, old[1] + 1)] = size

    def _value(self, tensor: Tensor) -> Value | None:
        block = BLOCKS.get(tensor.untyped_storage()._cdata)
        return None if block is None else (block.serial, self._versions.get(block.serial, 0))

    def mark(self, call: Callable[[], None]) -> None:
        """Something that must happen between operators (a stream waits, a message is sent)."""
        self.items.append(call)

    def signature(self) -> int:
        """The same for graphs with the same operators on the same shapes: what a compiler caches by."""
        return hash(tuple((i.name, i.shape, i.cost) for i in self.items if isinstance(i, Node)))

    def close(self) -> Iterator[Kernel | Callable[[], None]]:
        """The kernels and marks in the order in which they run; the graph is empty afterwards."""
        items, self.items = self.items, []
        order, kernel_of = _group(items)
        needed = {value for item in items if isinstance(item, Node) for value in item.kept}
        for position, item in enumerate(items):
            if isinstance(item, Node):
                needed.update(v for v in item.reads if kernel_of.get(v) != kernel_of.get(("node", position)))
        alive = {block.serial for block in list(BLOCKS.values())}
        versions, self._versions = self._versions, {}
        needed.update((serial, versions.get(serial, 0)) for serial in alive)
        for item in order:
            if isinstance(item, Kernel):
                item.cost = _cost(item, needed)
            yield item


def _group(items: list[Any]) -> tuple[list[Any], dict[Any, int]]:
    """Kernels and marks in order; and the number of the kernel of each value and of each node's position."""
    order: list[Any] = []
    kernel_of: dict[Any, int] = {}
    through: set[Value] = set()  # results of reductions
    mark = -1  # what comes after a mark must not run before it
    for position, node in enumerate(items):
        if not isinstance(node, Node):
            mark = len(order)
            order.append(node)
            continue
        index = _joins(node, order, kernel_of, through)
        if index is not None and index < mark:
            index = None
        if index is None:
            index = len(order)
            order.append(Kernel([node]))
        else:
            order[index].nodes.append(node)
        kernel_of["node", position] = index
        for value in node.writes:
            kernel_of[value] = index
            if node.reduces:
                through.add(value)
    return order, kernel_of


def _joins(node: Node, order: list[Any], kernel_of: dict[Any, int], through: set[Value]) -> int | None:
    """The kernel that this node can be part of: the latest that makes one of its inputs.

    All its other inputs are then there before that kernel runs, so that no kernel waits for itself.
    """
    if not node.fusible:
        return None
    makers = [kernel_of[value] for value in node.reads if value in kernel_of]
    if not makers:
        return None
    index = max(makers)
    first: Node = order[index].nodes[0]
    fits = first.fusible and first.size == node.size and first.stream == node.stream
    if not fits or any(value in through for value in node.reads if kernel_of.get(value) == index):
        return None
    return index


def _cost(kernel: Kernel, needed: set[Value]) -> Cost:
    if len(kernel.nodes) == 1 and not kernel.nodes[0].fusible:
        return kernel.nodes[0].cost
    inside = {value for node in kernel.nodes for value in node.writes}
    reads: dict[Value, int] = {}
    for node in kernel.nodes:
        for value, size in node.reads.items():
            if value not in inside:
                reads[value] = max(reads.get(value, 0), size)
    written = sum(size for node in kernel.nodes for value, size in node.writes.items() if value in needed)
    return Cost(0, sum(reads.values()), written, "")


def _given(position: tuple[int, str], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    index, name = position
    return args[index] if index < len(args) else kwargs.get(name)


def _taken_apart(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any
) -> Iterator[tuple[list[Any], Any]]:
    """(arguments, output) for each tensor of a `_foreach_` operator."""
    for i in range(len(args[0])):
        parts = [a[i] if isinstance(a, list | tuple) and len(a) == len(args[0]) else a for a in args]
        made = outputs[i] if isinstance(outputs, list | tuple) and outputs and not plan.mutates else None
        yield parts, made
