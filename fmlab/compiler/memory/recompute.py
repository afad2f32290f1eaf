"""Recompute as a pass: keep fewer bytes between the two graphs and pay for them in operations.

What the backward graph needs of the forward graph is either kept or computed again, from the inputs and from
what is kept (Chen et al. 2016, arXiv:1604.06174). Which to compute again: those that free the most bytes for
an operation, until the budget is met.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fmlab.compiler import graph as g
from fmlab.compiler.capture import Program, root
from fmlab.compiler.interface import drop_unneeded
from fmlab.meter.compute import flop_formula


@dataclass
class Recomputed:
    """What was given up and what it costs.

    bytes_before, bytes_after: kept between the graphs. flops: operations that the backward graph does again,
    a multiply-add counted as 2, other operators as 1 an element. nodes: what is no longer kept.
    """

    bytes_before: int
    bytes_after: int
    flops: int = 0
    nodes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"recompute: {self.bytes_before:,} -> {self.bytes_after:,} bytes kept, {self.flops:,} operations "
            f"again, {len(self.nodes)} tensors"
        )


def recompute(program: Program, budget_bytes: int) -> Recomputed:
    """Keep at most `budget_bytes` between a program's graphs, and compute the rest again.

    Nothing that draws random numbers is computed again: it would draw others. Raises ValueError where there
    is no backward graph, and for a budget that cannot be met, with the least that can.
    """
    if program.backward is None:
        raise ValueError("there is no backward graph, so nothing is kept")
    if not budget_bytes >= 0:
        raise ValueError(f"budget_bytes is {budget_bytes}; legal: 0 or more")
    report = Recomputed(program.saved_bytes, program.saved_bytes)
    chosen: set[fx.Node] = set()
    work: set[fx.Node] = set()
    while report.bytes_after > budget_bytes:
        best = _best(program.saved, chosen, work)
        if best is None:
            raise ValueError(
                f"at least {report.bytes_after:,} bytes must be kept, and the budget is {budget_bytes:,}: "
                "the rest depends on random numbers"
            )
        nodes, work = best
        chosen |= set(nodes)
        report.bytes_after = _kept_bytes(program.saved, chosen)
        report.nodes += [node.name for node in nodes]
    report.flops = sum(operations(one) for one in work)
    _move(program, chosen, work)
    drop_unneeded(program)
    return report


def operations(node: fx.Node) -> int:
    """Operations of a node: of products and attention by the meter's formulas, else one for each element;
    views none."""
    if g.is_view(node) or node.op != "call_function":
        return 0
    by_shape, by_value = flop_formula(getattr(node.target, "overloadpacket", None))
    args = [g.value(argument) for argument in node.args]
    kwargs = {key: g.value(argument) for key, argument in node.kwargs.items()}
    if by_shape is not None:
        shapes, named = pytree.tree_map_only(Tensor, lambda x: x.shape, (args, kwargs))
        out = pytree.tree_map_only(Tensor, lambda x: x.shape, g.value(node))
        return int(by_shape(*shapes, **named, out_shape=out))
    if by_value is not None:
        return int(by_value(*args, **kwargs, out_val=g.value(node)))
    return sum(x.numel() for x in g.tensors(node))


def _kept_bytes(saved: Sequence[fx.Node], chosen: set[fx.Node]) -> int:
    kept = {root(node): node for node in saved if node not in chosen}
    return sum(max(g.nbytes(n), g.nbytes(r)) for r, n in kept.items() if r.op != "placeholder")


def _best(
    saved: Sequence[fx.Node], chosen: set[fx.Node], work: set[fx.Node]
) -> tuple[list[fx.Node], set[fx.Node]] | None:
    """What frees the most bytes for an operation, and all work that is then done again.

    Views of the same memory are given up together: one alone would free nothing.
    """
    now, done = _kept_bytes(saved, chosen), sum(operations(one) for one in work)
    best, price = None, float("inf")
    together: dict[fx.Node, list[fx.Node]] = {}
    for node in saved:
        if node not in chosen and root(node).op != "placeholder":
            together.setdefault(root(node), []).append(node)
    for nodes in together.values():
        given_up = chosen | set(nodes)
        freed = now - _kept_bytes(saved, given_up)
        found = _work(given_up, set(saved) - given_up) if freed > 0 else None
        if found is None:
            continue
        cost = (1 + sum(operations(one) for one in found) - done) / freed
        if cost < price:
            best, price = (nodes, found), cost
    return best


def _work(wanted: set[fx.Node], kept: set[fx.Node]) -> set[fx.Node] | None:
    """The nodes to run again for those `wanted`, from inputs and what is kept; None if one may not."""
    work: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in work or node in kept or node.op == "placeholder":
            continue
        if not g.is_pure(node):
            return None
        work.add(node)
        stack += node.all_input_nodes
    return work


def _move(program: Program, chosen: set[fx.Node], work: set[fx.Node]) -> None:
    """Copy the work into the backward graph, each node before its first reader; hand over what it reads."""
    assert program.backward is not None
    forward, backward = program.forward.graph, program.backward.graph
    output = next(node for node in forward.nodes if node.op == "output")
    handed = list(output.args[0])
    saved = handed[len(program.results) :]
    placeholders = [node for node in backward.nodes if node.op == "placeholder"]
    there: dict[fx.Node, fx.Node] = dict(zip(saved, placeholders, strict=False))
    gone = {node: there.pop(node) for node in chosen}
    tangent = placeholders[len(saved)]
    start = next(node for node in backward.nodes if node.op != "placeholder")
    copies = []
    for node in forward.nodes:
        if node.op == "placeholder" and node not in there and any(user in work for user in node.users):
            with backward.inserting_before(tangent):
                there[node] = backward.placeholder(node.name)
            there[node].meta = dict(node.meta)
            handed.append(node)
        elif node in work:
            with backward.inserting_before(start):
                there[node] = backward.node_copy(node, there.__getitem__)
                there[node].meta.pop("overwrites", None)  # held for the forward graph's order
            copies.append(there[node])
            if node.op == "get_attr":
                _carry(program.forward, program.backward, there[node])
    for node, placeholder in gone.items():
        placeholder.replace_all_uses_with(there[node])
    for copy in reversed(copies):  # as late as may be: what is not there yet takes no memory
        if (first := next((node for node in backward.nodes if node in copy.users), None)) is not None:
            first.prepend(copy)
    output.args = (tuple(handed),)


def _carry(source: fx.GraphModule, to: fx.GraphModule, node: fx.Node) -> None:
    """Give a graph the constant that its new node reads, under a name that is free there."""
    name = wanted = str(node.target)
    constant = getattr(source, wanted)
    while hasattr(to, name) and getattr(to, name) is not constant:
        name += "_"
    node.target = name
    setattr(to, name, constant)
