"""Recompute as a pass: keep fewer bytes between the two graphs and pay for them in operations.

What the backward graph needs of the forward graph is either kept or computed again, from the inputs and from
what is kept (Chen et al. 2016, arXiv:1604.06174). Which to compute again: those that free the most bytes for
an operation, until the budget is met.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.utils.flop_counter import flop_registry

from fmlab.compiler import graph as g
from fmlab.compiler.capture import Program, root
from fmlab.compiler.interface import drop_unneeded


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
    report = Recomputed(program.saved_bytes, program.saved_bytes)
    chosen: dict[fx.Node, list[fx.Node]] = {}
    pinned: set[fx.Node] = set()
    while report.bytes_after > budget_bytes:
        best = _best(program, chosen, pinned)
        if best is None:
            raise ValueError(
                f"at least {report.bytes_after:,} bytes must be kept, and the budget is {budget_bytes:,}: "
                "the rest are inputs of what would be computed again, or random numbers"
            )
        node, work, leaves = best
        chosen[node] = work
        pinned |= leaves
        report.bytes_after = _kept_bytes(program.saved, chosen)
        report.flops += sum(operations(one) for one in work)
        report.nodes.append(node.name)
    _move(program, chosen)
    drop_unneeded(program)
    return report


def operations(node: fx.Node) -> int:
    """Operations of a node: by torch's formulas for products, else one for each element; views none."""
    if g.is_view(node) or node.op != "call_function":
        return 0
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return sum(x.numel() for x in g.tensors(node))
    args = [g.value(argument) for argument in node.args]
    kwargs = {key: g.value(argument) for key, argument in node.kwargs.items()}
    result = g.value(node)
    return int(formula(*args, **kwargs, out_val=result))


def _kept_bytes(saved: Sequence[fx.Node], chosen: dict[fx.Node, list[fx.Node]]) -> int:
    kept = {root(node): node for node in saved if node not in chosen}
    return sum(max(g.nbytes(n), g.nbytes(r)) for r, n in kept.items() if r.op != "placeholder")


def _best(
    program: Program, chosen: dict[fx.Node, list[fx.Node]], pinned: set[fx.Node]
) -> tuple[fx.Node, list[fx.Node], set[fx.Node]] | None:
    """The kept node that frees the most bytes for an operation, the work, and what that work reads."""
    saved = [node for node in program.saved if node not in chosen]
    now = _kept_bytes(program.saved, chosen)
    best, price = None, float("inf")
    for node in saved:
        if node in pinned or root(node).op == "placeholder":
            continue
        found = _work(node, set(saved) - {node})
        freed = now - _kept_bytes(program.saved, {**chosen, node: []})
        if found is None or freed <= 0:
            continue
        cost = (1 + sum(operations(one) for one in found[0])) / freed
        if cost < price:
            best, price = (node, *found), cost
    return best


def _work(node: fx.Node, available: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]] | None:
    """The nodes to run again for `node`, in order, and the kept nodes that they read; None if none may."""
    work: dict[fx.Node, None] = {}
    leaves: set[fx.Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in work or one in leaves:
            continue
        if one in available:
            leaves.add(one)
        elif one.op != "placeholder":
            if not g.is_pure(one):
                return None
            work[one] = None
            stack += one.all_input_nodes
    place = {other: i for i, other in enumerate(node.graph.nodes)}
    return sorted(work, key=place.__getitem__), leaves


def _move(program: Program, chosen: dict[fx.Node, list[fx.Node]]) -> None:
    """Copy the work into the backward graph, in front of its first reader, and hand over what it reads."""
    assert program.backward is not None
    forward, backward = program.forward.graph, program.backward.graph
    output = next(node for node in forward.nodes if node.op == "output")
    results = list(output.args[0])
    saved = results[len(program.results) :]
    placeholders = [node for node in backward.nodes if node.op == "placeholder"]
    there: dict[fx.Node, fx.Node] = dict(zip(saved, placeholders, strict=False))
    first = next(node for node in backward.nodes if node.op != "placeholder")
    anchor = placeholders[len(saved)] if len(placeholders) > len(saved) else first
    for node, work in chosen.items():
        placeholder = there.pop(node)
        for one in work:
            for source in one.all_input_nodes:
                if source not in there and source.op == "placeholder":
                    with backward.inserting_before(anchor):
                        there[source] = backward.placeholder(source.name)
                    there[source].meta = dict(source.meta)
                    results.append(source)
        copies = dict(there)
        start = min(placeholder.users, key=list(backward.nodes).index)
        for one in work:
            with backward.inserting_before(start):
                copies[one] = backward.node_copy(one, copies.__getitem__)
            if one.op == "get_attr":
                setattr(program.backward, str(one.target), getattr(program.forward, str(one.target)))
        placeholder.replace_all_uses_with(copies[node])
        there[node] = placeholder
    output.args = (tuple(results),)
