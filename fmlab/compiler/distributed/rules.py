"""For each operator: from where its inputs are to where its result is.

A rule gives None where it knows no placement; what it is asked about is cut or partial somewhere, since what
depends on replicated values alone is replicated, whatever the operator.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fmlab.compiler import graph as g
from fmlab.compiler.distributed.placement import (
    PARTIAL,
    REPLICATED,
    Placement,
    Placements,
    Shard,
    broadcast,
    viewed,
)
from fmlab.compiler.passes.layout import order

aten = torch.ops.aten

#: (argument) -> its placement; numbers are replicated.
Where = Callable[[Any], Any]
#: (node, where its inputs are, number of ranks) -> where its result is, or None.
Rule = Callable[[fx.Node, Where, int], Placements | None]


def place(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Where the result of a node is, or None if there is no rule for this."""
    if node.target in RULES:
        return RULES[node.target](node, where, ranks)
    if isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
        return _elementwise(node, where, ranks)
    return None


# ---- products ----------------------------------------------------------------------------------------------


# region product
def product(left: Any, right: Any, where: Where) -> Placement | None:
    """[..., i, k] times [..., k, o]."""
    rows, inner = len(g.shape(left)) - 2, len(g.shape(left)) - 1
    match where(left), where(right):
        case Shard(dim, parts), "replicated" if dim == rows:
            return Shard(rows, parts)
        case "replicated", Shard(dim, parts) if dim == inner:
            return Shard(inner, parts)  # cut by columns: each rank makes some of them
        case Shard(a, parts), Shard(b, others) if (a, b) == (inner, rows) and parts == others:
            return PARTIAL  # cut by rows: each rank has some of the terms of each sum
        case Shard(a, parts), Shard(b, others) if a == b < rows and parts == others:
            return Shard(a, parts)  # many products, each of them on one rank
    return None


# endregion


def _product(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    return product(node.args[0], node.args[1], where)


def _product_and_bias(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    bias, left, right = node.args[:3]
    made = product(left, right, where)
    if made is None or made == PARTIAL:
        return None  # each rank would add the bias; TensorParallel takes such a node apart
    return broadcast([(g.shape(bias), where(bias)), (g.shape(node), made)], g.shape(node))


# ---- element by element ------------------------------------------------------------------------------------


def _elementwise(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Linear operators keep a sum of parts as it is; the others need it whole."""
    sources = node.all_input_nodes
    if node.target in LINEAR and LINEAR[node.target](node, where):
        return PARTIAL
    return broadcast([(g.shape(s), where(s)) for s in sources], g.shape(node))


def _sum_of_parts(node: fx.Node, where: Where) -> bool:
    """a + b: both are parts. To a part each rank would add the whole other one."""
    return where(node.args[0]) == where(node.args[1]) == PARTIAL


def _scaled_part(node: fx.Node, where: Where) -> bool:
    """a * b: one is a part, the other whole."""
    return {where(node.args[0]), where(node.args[1])} == {PARTIAL, REPLICATED}


def _part_alone(node: fx.Node, where: Where) -> bool:
    """a / b or -a: a is a part, the rest whole."""
    first, *rest = (where(argument) for argument in node.args)
    return first == PARTIAL and all(one == REPLICATED for one in rest)


LINEAR = {
    aten.add.Tensor: _sum_of_parts,
    aten.sub.Tensor: _sum_of_parts,
    aten.mul.Tensor: _scaled_part,
    aten.div.Tensor: _part_alone,
    aten.neg.default: _part_alone,
}


def _like(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Only the shape of the input is read, and the shape of a part is that of the whole."""
    placement: Placement = where(node.args[0])
    return placement if isinstance(placement, Shard) else REPLICATED


# ---- the same elements, seen otherwise ---------------------------------------------------------------------


def _view(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    source = node.args[0]
    placement: Placement = where(source)
    if not isinstance(placement, Shard):
        return placement
    return viewed(g.shape(source), g.shape(node), placement, ranks)


def _expand(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    source = node.args[0]
    if where(source) == PARTIAL:
        return PARTIAL
    return broadcast([(g.shape(source), where(source))], g.shape(node))


def _permute(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    placement: Placement = where(node.args[0])
    dims = order(node)
    if not isinstance(placement, Shard) or dims is None:
        return placement
    return Shard(dims.index(placement.dim), placement.parts)


def _unbind(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    placement: Placement = where(node.args[0])
    count = len(g.value(node))
    if isinstance(placement, Shard):
        dim = _dim(node, 1, 0) % len(g.shape(node.args[0]))
        if placement.dim == dim:
            return None
        placement = Shard(placement.dim - (placement.dim > dim), placement.parts)
    return (placement,) * count


def _split(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Along the cut only if the pieces are its parts."""
    placement: Placement = where(node.args[0])
    pieces = g.value(node)
    dim = _dim(node, 2, 0) % len(g.shape(node.args[0]))
    if isinstance(placement, Shard) and placement.dim == dim:
        even = len({tuple(piece.shape) for piece in pieces}) == 1
        if not even or placement.parts != len(pieces):
            return None
        placement = Shard(dim)
    return (placement,) * len(pieces)


def _stack(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    placement = _alike(node.args[0], where)
    if not isinstance(placement, Shard):
        return placement
    dim = _dim(node, 1, 0) % len(g.shape(node))
    return Shard(placement.dim + (placement.dim >= dim), placement.parts)


def _cat(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Along the cut, equal pieces become its parts."""
    pieces: Any = node.args[0]
    placement = _alike(pieces, where)
    dim = _dim(node, 1, 0) % len(g.shape(node))
    if isinstance(placement, Shard) and placement.dim == dim:
        even = len({g.shape(piece) for piece in pieces}) == 1
        return Shard(dim, len(pieces)) if even and placement.parts == 1 else None
    return placement


def _alike(nodes: Any, where: Where) -> Placement | None:
    found = {where(node) for node in nodes}
    return found.pop() if len(found) == 1 else None


def _dim(node: fx.Node, position: int, default: int) -> int:
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    return int(given)


def _sized(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Of the input only dtype and device are read; the size is given."""
    return REPLICATED


def _unfold(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Windows along another dim than the cut; their length is a dim behind all others."""
    placement: Placement = where(node.args[0])
    forward = node.target is aten.unfold.default
    dims = len(g.shape(node.args[0] if forward else node))
    dim: Any = node.args[1 if forward else 2]
    along = isinstance(placement, Shard) and placement.dim in (dim % dims, dims)
    return None if along else placement


def _elsewhere(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Operators on one dim, of a tensor that is cut along another one."""
    placement: Placement = where(node.args[0])
    dims: Any = node.args[1]
    touched = {dim % len(g.shape(node)) for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    return placement if not isinstance(placement, Shard) or placement.dim not in touched else None


# ---- along a dim -------------------------------------------------------------------------------------------


def _sum(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Over the cut each rank has a part of the sum."""
    placement: Placement = where(node.args[0])
    if not isinstance(placement, Shard):
        return placement
    rank = len(g.shape(node.args[0]))
    dims = _dims(node, rank)
    if placement.dim in dims:
        return PARTIAL
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    gone = 0 if keep else sum(dim < placement.dim for dim in dims)
    return Shard(placement.dim - gone, placement.parts)


def _softmax(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    """Rows are on one rank, or not done."""
    sources = node.all_input_nodes
    placement = _alike(sources, where)
    dim = int(node.args[len(sources)]) % len(g.shape(node))  # type: ignore[arg-type]
    return placement if isinstance(placement, Shard) and placement.dim != dim else None


def _dims(node: fx.Node, rank: int) -> set[int]:
    given: Any = node.args[1] if len(node.args) > 1 else None
    return {dim % rank for dim in given} if given else set(range(rank))


# ---- attention: [b, h, l, k], with different heads on each rank --------------------------------------------


def _attention(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    return _by_heads(node, node.args[:3], where, 2)


def _attention_backward(node: fx.Node, where: Where, ranks: int) -> Placements | None:
    return _by_heads(node, node.args[:6], where, 3)


def _by_heads(node: fx.Node, cut: Iterable[Any], where: Where, results: int) -> Placements | None:
    cut = list(cut)
    others = [source for source in node.all_input_nodes if source not in cut]
    masks = all(
        where(one) == Shard(1) or (where(one) == REPLICATED and g.shape(one)[-3:-2] in ((), (1,)))
        for one in others
    )
    alike = all(where(one) == Shard(1) for one in cut)
    return (Shard(1),) * results if alike and masks else None


RULES: dict[Any, Rule] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _product_and_bias,
    aten.empty_like.default: _like,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.full_like.default: _like,
    aten.fill.Scalar: _like,
    aten.new_full.default: _sized,
    aten.new_zeros.default: _sized,
    aten.new_empty.default: _sized,
    aten.unfold.default: _unfold,
    aten.unfold_backward.default: _unfold,
    aten.flip.default: _elsewhere,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.dim: _view,
    aten.clone.default: _view,
    aten.alias.default: _view,
    aten.detach.default: _view,
    aten.expand.default: _expand,
    aten.t.default: _permute,
    aten.transpose.int: _permute,
    aten.permute.default: _permute,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


#: What makes a tensor of a size -> which argument that is.
FACTORIES: dict[Any, int] = {
    aten.empty.memory_format: 0,
    aten.zeros.default: 0,
    aten.new_zeros.default: 1,
    aten.new_empty.default: 1,
}


def localize(node: fx.Node, placement: Placements, ranks: int) -> None:
    """Make the sizes among a node's arguments those of one rank."""
    first = placement[0] if isinstance(placement, tuple) else placement
    sizes: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(first, Shard):
        return
    if node.target is aten.unfold_backward.default:
        whole_sizes: Any = node.args[1]
        local_sizes = [n // ranks if dim == first.dim else n for dim, n in enumerate(whole_sizes)]
        node.args = (node.args[0], local_sizes, *node.args[2:])
        return
    if node.target in FACTORIES:
        where = FACTORIES[node.target]
        whole: Any = node.args[where]
        size = [n // ranks if dim == first.dim else n for dim, n in enumerate(whole)]
        node.args = (*node.args[:where], size, *node.args[where + 1 :])
        return
    if node.target is aten.embedding_dense_backward.default:
        if first.dim == 0:
            node.args = (*node.args[:2], node.args[2] // ranks, *node.args[3:])  # type: ignore[operator]
        return
    if node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default):
        local: Any = [n // ranks if dim == first.dim and n > 0 else n for dim, n in enumerate(sizes)]
    elif node.target in (aten.split_with_sizes.default, aten.split.Tensor):
        if _dim(node, 2, 0) % len(g.value(node)[0].shape) != first.dim:
            return
        local = sizes // ranks if isinstance(sizes, int) else [n // ranks for n in sizes]
    else:
        return
    node.args = (node.args[0], local, *node.args[2:])
