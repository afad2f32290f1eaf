"""Which nodes are fused: neighbours that walk over the same rows, as long as that saves bytes and closes no
circle.

Legal: one space (rows, columns); elementwise, or a reduction over a row; contiguous memory, or for what is
read parts of wider rows; no path that leaves the group and comes back, because a group runs in one go. A node
inside that somebody outside reads is written as well, so a second reader costs a write and never a wrong
result. Worth it: bytes that need no longer be read, and written where nobody else reads them.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fmlab.compiler import graph as g
from fmlab.compiler.fusion.kernel import FusedKernel, lift
from fmlab.compiler.fusion.operators import (
    BY_IMAGE,
    BY_ROW,
    ELEMENTWISE,
    JOINING,
    LABELLED,
    REDUCING,
    ROW_FLOPS,
)
from fmlab.compiler.fusion.rows import is_sum_of_rows, is_transparent, space, why_not
from fmlab.compiler.passes.base import GraphPass, Report, escaping

aten = torch.ops.aten


@dataclass(frozen=True)
class CostModel:
    """When to fuse. flops_per_byte: additions that take as long as moving a byte. least_bytes: a group that
    saves no more is not worth a kernel of its own. least_nodes: operators of a group; 1, with least_bytes=-1,
    makes a kernel of each operator that stands alone too."""

    flops_per_byte: float = 2.0
    least_bytes: int = 0
    least_nodes: int = 2

    def saved(self, inside: Iterable[fx.Node]) -> int:
        """Bytes that a group of these nodes does not move, which they would move one by one."""
        inside = set(inside)
        total = 0
        for node in inside:
            if g.is_view(node) or node.target is operator.getitem:
                continue
            for source in node.all_input_nodes:
                if _maker(source) in inside:
                    total += g.nbytes(source)
        read = {s for node in inside for s in node.all_input_nodes if s not in inside}
        twice = [s for node in inside if not g.is_view(node) for s in node.all_input_nodes if s in read]
        total += sum(g.nbytes(s) for s in twice) - sum(g.nbytes(s) for s in read)
        alone = [n for n in inside if isinstance(g.value(n), Tensor) and all(u in inside for u in n.users)]
        return total + sum(g.nbytes(node) for node in alone if not g.is_view(node))

    def again(self, node: fx.Node, readers: Sequence[Sequence[fx.Node]]) -> bool:
        """Whether to compute an elementwise node again in each group of `readers`, rather than write it once
        and read it in each: bytes that this saves against operations that it costs."""
        saved = g.nbytes(node)
        for members in readers:
            read = {source for member in members for source in member.all_input_nodes}
            more = [source for source in node.all_input_nodes if source not in read]
            saved += g.nbytes(node) - sum(g.nbytes(source) for source in more)
        return saved > 0 and flops(node) * len(readers) <= self.flops_per_byte * saved


def flops(node: fx.Node) -> int:
    """Additions that a fusible node costs, roughly."""
    x = g.tensors(node)[0]
    if node.target in REDUCING:
        return ROW_FLOPS * x.numel()
    known = ELEMENTWISE.get(node.target)
    return (30 if known is None else known.flops) * x.numel()


def _maker(node: fx.Node) -> fx.Node:
    """The node that made what this view, or picked result, shows."""
    while node.target is operator.getitem or is_transparent(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


class Fusion(GraphPass):
    """Joins elementwise chains and reductions over rows into groups that read and write their memory once.

    device: whose nodes are joined, "cpu" or "cuda". C++ is generated for the first, Triton for both.
    """

    name = "fusion"
    claims = "the same operators on the same numbers; generated code may round in other places"

    def __init__(self, cost: CostModel | None = None, device: str = "cpu"):
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r}: fused groups run on 'cpu' or 'cuda'")
        self.cost, self.device = CostModel() if cost is None else cost, device

    def apply(self, graph: fx.Graph, report: Report) -> None:
        groups = Groups(graph, report, self.device)
        for node in graph.nodes:
            groups.add(node)
        for node in list(graph.nodes):
            groups.compute_again(node, self.cost)
        number = 0
        for members in groups.members():
            work = [n for n in members if not g.is_view(n) and n.target is not operator.getitem]
            if len(work) < self.cost.least_nodes:
                continue
            if self.cost.saved(members) <= self.cost.least_bytes:
                report.refused.append(f"{work[-1].name}: fusing {len(work)} nodes saves too few bytes")
                continue
            _contract(graph, members, number)
            number += 1
            report.made["group"] += 1
            report.made["node fused"] += len(work)
        _sort(graph)


class Groups:
    """Grows groups node by node, in the order of the graph."""

    def __init__(self, graph: fx.Graph, report: Report, device: str = "cpu"):
        self.report, self.device = report, device
        self.place: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
        self.group: dict[fx.Node, int] = {}
        self.lists: dict[int, list[fx.Node]] = {}
        self.spaces: dict[int, tuple[int, int]] = {}
        self.kept = escaping(graph)

    def members(self) -> list[list[fx.Node]]:
        """The nodes of each group, in the order of the graph."""
        return [sorted(nodes, key=self.place.__getitem__) for nodes in self.lists.values()]

    def add(self, node: fx.Node) -> None:
        """Put a node into the groups of what it reads, where that is legal, or into one of its own."""
        where = space(node)
        if where is None:
            if node.op == "call_function" and any(source in self.group for source in node.all_input_nodes):
                self.report.refused.append(f"{g.name(node)}: {why_not(node)}")
            return
        if g.tensors(node)[0].device.type != self.device:
            self.report.refused.append(f"{g.name(node)}: not on {self.device}")
            return
        mine = self._open(node, where)
        for source in node.all_input_nodes:
            theirs = self.group.get(source)
            if theirs is None or theirs == mine or not self._agree(theirs, mine, node):
                continue
            if _is_last(source):
                self.report.refused.append(f"{node.name}: {source.name} is known after the last row only")
                continue
            if not self._same_walk(theirs, mine):
                self.report.refused.append(f"{node.name}: one group walks over rows, the other over images")
                continue
            if self._circle(theirs, mine):
                self.report.refused.append(f"{node.name}: joining {source.name} would close a circle")
                continue
            self._join(theirs, mine)

    def compute_again(self, node: fx.Node, cost: CostModel) -> None:
        """Copy an elementwise node into the groups that read it, if nobody else needs it and that is cheaper.

        Only one that reads nothing of its own group: what it reads is in memory anyway.
        """
        mine = self.group.get(node)
        if mine is None or node.target not in ELEMENTWISE or node in self.kept:
            return
        readers: dict[int | None, list[fx.Node]] = defaultdict(list)
        for user in node.users:
            readers[self.group.get(user)].append(user)
        readers.pop(mine, None)
        if not readers or None in readers or any(self.group.get(s) == mine for s in node.all_input_nodes):
            return
        if any(self.spaces[number] != self.spaces[mine] for number in readers if number is not None):
            return
        if not cost.again(node, [self.lists[number] for number in readers if number is not None]):
            return
        for number, users in readers.items():
            assert number is not None
            first = min(users, key=self.place.__getitem__)
            with node.graph.inserting_before(first):
                twin = node.graph.node_copy(node, lambda source: source)
            for user in users:
                user.replace_input_with(node, twin)
            self.place[twin] = self.place[first] - 0.5
            self.group[twin] = number
            self.lists[number].append(twin)
            self.report.made["computed again"] += 1

    def _open(self, node: fx.Node, where: tuple[int, int]) -> int:
        number = int(self.place[node])
        self.group[node], self.lists[number], self.spaces[number] = number, [node], where
        return number

    def _agree(self, theirs: int, mine: int, node: fx.Node) -> bool:
        """One space; or `node` has one number a row of the other group, such as a variance + eps."""
        a, b = self.spaces[theirs], self.spaces[mine]
        if a == b:
            return True
        alone = len(self.lists[mine]) == 1 and node.target not in REDUCING and node.target is not JOINING
        if b == (a[0], 1) and alone:
            self.spaces[mine] = a
            return True
        return False

    def _same_walk(self, theirs: int, mine: int) -> bool:
        """Whether no row's sum of one group meets a sum over images of the other."""
        nodes = [node for number in (theirs, mine) for node in self.lists[number]]
        rows = any(n.target in BY_ROW or n.target in LABELLED for n in nodes if not is_sum_of_rows(n))
        return not (rows and any(n.target in BY_IMAGE for n in nodes))

    def _join(self, theirs: int, mine: int) -> None:
        for node in self.lists[theirs]:
            self.group[node] = mine
        self.lists[mine] += self.lists.pop(theirs)
        del self.spaces[theirs]

    def _circle(self, theirs: int, mine: int) -> bool:
        """Whether something outside of both lies on a way from one to the other (groups taken as one)."""
        both = (theirs, mine)
        first = min(self.place[node] for number in both for node in self.lists[number])
        stack = [s for number in both for node in self.lists[number] for s in node.all_input_nodes]
        stack = [source for source in stack if self.group.get(source) not in both]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            number = self.group.get(node)
            if number in both:
                return True
            if node in seen:
                continue
            block = [node] if number is None else self.lists[number]
            seen.update(block)
            if all(self.place[one] < first for one in block):
                continue
            stack += [source for one in block for source in one.all_input_nodes]
        return False


def _is_last(node: fx.Node) -> bool:
    """Whether a value is a sum over all rows: no reader can be in the group that makes it."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        whole: bool = source.target in LABELLED
        norms = (aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default)
        return whole or (source.target in norms and bool(index))
    if is_transparent(node):
        assert isinstance(node.args[0], fx.Node)
        return _is_last(node.args[0])
    return is_sum_of_rows(node)


def _show_outside(graph: fx.Graph, members: list[fx.Node]) -> None:
    """Give readers outside their own view of what a group makes, so that no group writes a view."""
    inside = set(members)
    for node in members:
        outside = [user for user in node.users if user not in inside]
        if is_transparent(node) and outside:
            with graph.inserting_after(node):
                twin = graph.node_copy(node, lambda source: source)
            for user in outside:
                user.replace_input_with(node, twin)


def _contract(graph: fx.Graph, members: list[fx.Node], number: int) -> None:
    """Put one call in the place of a group."""
    _show_outside(graph, members)
    spaces = [found for node in members if (found := space(node)) is not None]
    module, inputs, results = lift(members, graph.owning_module)
    kernel = FusedKernel(module, max(spaces, key=lambda s: s[1]), number)
    with graph.inserting_after(members[-1]):
        call = graph.call_function(kernel, tuple(inputs))
    call.meta["val"] = tuple(g.value(node) for node in results)
    after = call
    for index, node in enumerate(results):
        with graph.inserting_after(after):
            picked = graph.call_function(operator.getitem, (call, index))
        picked.meta["val"] = g.value(node)
        node.replace_all_uses_with(picked)
        after = picked
    for node in reversed(members):
        graph.erase_node(node)


def _sort(graph: fx.Graph) -> None:
    """Put every node behind what it reads, otherwise in the order it had."""
    done: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    done.update(node for node in graph.nodes if node.op == "placeholder")
    last = next((n for n in reversed(list(graph.nodes)) if n.op == "placeholder"), None)
    while waiting:
        later = []
        for node in waiting:
            if all(source in done for source in node.all_input_nodes):
                if last is not None:
                    last.append(node)
                last = node
                done.add(node)
            else:
                later.append(node)
        assert len(later) < len(waiting), "a circle of groups"
        waiting = later
