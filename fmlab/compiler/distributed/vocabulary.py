"""Along the cut: look-ups, maxima, softmax and cross-entropy where each rank has a part of the vocabulary.

A rank knows the rows, or columns, from rank * size on. What it looks up elsewhere is 0, so that the sum over
ranks is the row (Shoeybi et al. 2019, arXiv:1909.08053, section 3: parallel embedding and cross-entropy).
Each operator here is taken apart into operators that every rank runs on its part, with a sum or a maximum of
one number a row between them, instead of the logits.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.distributed_c10d import _resolve_process_group

from fmlab.compiler import graph as g
from fmlab.compiler.distributed.collective import insert_sum
from fmlab.compiler.distributed.placement import OWN, PARTIAL, REPLICATED, Shard
from fmlab.compiler.passes.base import replace

if TYPE_CHECKING:
    from fmlab.compiler.distributed.propagation import Propagation

aten = torch.ops.aten


class FirstRow:
    """The number of the first row, of `size` each, that a rank of a group has; int64, no dims."""

    pure = True
    __name__ = "first_row"

    def __init__(self, size: int, group: str, device: torch.device):
        self.size, self.group, self.device = size, group, device

    def __call__(self) -> Tensor:
        group: Any = self.group
        return self.of(dist.get_rank(_resolve_process_group(group)))

    def of(self, rank: int) -> Tensor:
        """That of a rank."""
        return torch.tensor(rank * self.size, device=self.device)

    def fake(self) -> Tensor:
        """The result without data."""
        return torch.empty((), dtype=torch.int64, device=self.device)


def along_the_cut(work: "Propagation", node: fx.Node) -> bool:
    """Take a node apart that works along the cut of its input. False: it does not, or there is no way."""
    apart = APART.get(node.target)
    return apart is not None and apart(work, node)


def arguments(node: fx.Node) -> Any:
    """What a node gives its operator, in order."""
    return node.args


def _size(work: "Propagation", x: fx.Node, dim: int) -> int | None:
    """How many of dim `dim` a rank has, if x is cut there, in one piece; else None."""
    where = work.at.get(x)
    dim %= len(g.shape(x))
    return g.shape(x)[dim] // work.ranks if where == Shard(dim) else None


# region own
def _own(work: "Propagation", node: fx.Node, ids: fx.Node, size: int) -> tuple[fx.Node, fx.Node]:
    """Numbers from this rank's first row on, 0 where they are another rank's; and where that is."""
    first = work.add(node, FirstRow(size, work.group, g.value(ids).device), at=OWN)
    local = work.add(node, aten.sub.Tensor, ids, first, at=OWN)
    below = work.add(node, aten.lt.Scalar, local, 0, at=OWN)
    above = work.add(node, aten.ge.Scalar, local, size, at=OWN)
    outside = work.add(node, aten.logical_or.default, below, above, at=OWN)
    return work.add(node, aten.masked_fill.Scalar, local, outside, 0, at=OWN), outside


def _embedding(work: "Propagation", node: fx.Node) -> bool:
    table, ids = arguments(node)[:2]
    size = _size(work, table, 0)
    if size is None or work.at[ids] != REPLICATED:
        return False
    own, outside = _own(work, node, ids, size)
    rows = work.add(node, aten.embedding.default, table, own, at=OWN)
    column = work.add(node, aten.unsqueeze.default, outside, -1, at=OWN)
    replace(node, work.add(node, aten.masked_fill.Scalar, rows, column, 0, at=PARTIAL))
    return True


# endregion


def _embedding_backward(work: "Propagation", node: fx.Node) -> bool:
    """The rows' gradients, of this rank's rows; others are 0 and go to the first row."""
    gradient, ids, rows, padding, by_frequency = arguments(node)
    if node not in work.rows or by_frequency or work.at[ids] != REPLICATED:
        return False
    whole = work.total(gradient, node)
    own, outside = _own(work, node, ids, rows // work.ranks)
    if padding != -1:
        padded = work.add(node, aten.eq.Scalar, ids, padding, at=OWN)
        outside = work.add(node, aten.logical_or.default, outside, padded, at=OWN)
    column = work.add(node, aten.unsqueeze.default, outside, -1, at=OWN)
    mine = work.add(node, aten.masked_fill.Scalar, whole, column, 0, at=OWN)
    new = work.add(node, aten.embedding_dense_backward.default, mine, own, rows, -1, False, at=Shard(0))
    replace(node, new)
    return True


def _maximum(work: "Propagation", node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    """The maximum over all ranks along the cut, kept as a dim of one."""
    key = (x, dim % len(g.shape(x)))
    if key not in work.maxima:
        mine = work.add(node, aten.amax.default, x, [dim], True, at=OWN)
        work.maxima[key] = wait = insert_sum(node, mine, work.group, "max")
        for new in (wait, *wait.all_input_nodes):
            work.at[new] = REPLICATED
        work.at[mine] = OWN
        work.report.made["maximum"] += 1
    return work.maxima[key]


def _amax(work: "Propagation", node: fx.Node) -> bool:
    x, dims, keep = (*arguments(node), False)[:3]
    if len(dims) != 1 or not keep or _size(work, x, dims[0]) is None:
        return False
    replace(node, _maximum(work, node, x, dims[0]))
    return True


def _softmax(work: "Propagation", node: fx.Node) -> bool:
    x, dim, half = arguments(node)
    if half or _size(work, x, dim) is None:
        return False
    shifted = work.add(node, aten.sub.Tensor, x, _maximum(work, node, x, dim))
    power = work.add(node, aten.exp.default, shifted)
    total = work.total(work.add(node, aten.sum.dim_IntList, power, [dim], True), node)
    if node.target is aten._softmax.default:
        replace(node, work.add(node, aten.div.Tensor, power, total))
    else:
        replace(node, work.add(node, aten.sub.Tensor, shifted, work.add(node, aten.log.default, total)))
    return True


def _softmax_backward(work: "Propagation", node: fx.Node) -> bool:
    d, y, dim, dtype = arguments(node)
    if _size(work, y, dim) is None or work.at[d] != work.at[y] or dtype != g.value(y).dtype:
        return False
    log = node.target is aten._log_softmax_backward_data.default
    scaled = d if log else work.add(node, aten.mul.Tensor, d, y)
    total = work.total(work.add(node, aten.sum.dim_IntList, scaled, [dim], True), node)
    share = work.add(node, aten.exp.default, y) if log else y
    replace(node, work.add(node, aten.sub.Tensor, scaled, work.add(node, aten.mul.Tensor, share, total)))
    return True


def _gather(work: "Propagation", node: fx.Node) -> bool:
    x, dim, index = arguments(node)[:3]
    size = _size(work, x, dim)
    if size is None or work.at[index] != REPLICATED:
        return False
    own, outside = _own(work, node, index, size)
    picked = work.add(node, aten.gather.default, x, dim, own, at=OWN)
    replace(node, work.add(node, aten.masked_fill.Scalar, picked, outside, 0, at=PARTIAL))
    return True


def _scatter_add(work: "Propagation", node: fx.Node) -> bool:
    x, dim, index, source = arguments(node)
    size = _size(work, x, dim)
    alike = g.shape(index) == g.shape(source)
    if size is None or not alike or {work.at[index], work.at[source]} != {REPLICATED}:
        return False
    own, outside = _own(work, node, index, size)
    mine = work.add(node, aten.masked_fill.Scalar, source, outside, 0, at=OWN)
    replace(node, work.add(node, aten.scatter_add.default, x, dim, own, mine, at=work.at[x]))
    return True


# region nll
def _labels(
    work: "Propagation", node: fx.Node, labels: fx.Node, size: int, ignored: Any
) -> tuple[fx.Node, ...]:
    """This rank's columns of the labels; where it has none; where a label does not count."""
    own, outside = _own(work, node, labels, size)
    skipped = work.add(node, aten.eq.Scalar, labels, ignored, at=REPLICATED)
    none = work.add(node, aten.logical_or.default, outside, skipped, at=OWN)
    return own, none, skipped


def _nll_loss(work: "Propagation", node: fx.Node) -> bool:
    """Each rank adds up the labels that are its own: the loss is a sum of parts."""
    scores, labels, weight, reduction, ignored = arguments(node)
    size = _size(work, scores, 1) if len(g.shape(scores)) == 2 else None
    if size is None or weight is not None or work.at[labels] != REPLICATED:
        return False
    own, none, skipped = _labels(work, node, labels, size, ignored)
    at = work.add(node, aten.unsqueeze.default, own, 1, at=OWN)
    column = work.add(node, aten.gather.default, scores, 1, at, at=OWN)
    picked = work.add(node, aten.squeeze.dim, column, 1, at=OWN)
    loss = work.add(node, aten.masked_fill.Scalar, picked, none, 0, at=PARTIAL)
    loss = work.add(node, aten.neg.default, loss)
    counted = work.add(node, aten.logical_not.default, skipped)
    dtype = g.value(scores).dtype
    count = work.add(node, aten.sum.default, work.add(node, aten._to_copy.default, counted, dtype=dtype))
    if reduction != 0:
        loss = work.add(node, aten.sum.dim_IntList, loss, [0])
    if reduction == 1:
        loss = work.add(node, aten.div.Tensor, loss, count)
    for user in list(node.users):
        replace(user, loss if user.args[1] == 0 else count)
    node.graph.erase_node(node)
    return True


# endregion


def _nll_loss_backward(work: "Propagation", node: fx.Node) -> bool:
    d_loss, scores, labels, weight, reduction, ignored, count = arguments(node)
    size = _size(work, scores, 1) if len(g.shape(scores)) == 2 else None
    if size is None or weight is not None or work.at[labels] != REPLICATED:
        return False
    d = work.add(node, aten.neg.default, work.total(d_loss, node))
    if reduction == 1:
        d = work.add(node, aten.div.Tensor, d, count)
    own, none, _ = _labels(work, node, labels, size, ignored)
    rows = work.add(node, aten.expand.default, d, list(g.shape(labels)))
    mine = work.add(node, aten.masked_fill.Scalar, rows, none, 0, at=OWN)
    zeros = work.add(node, aten.zeros_like.default, scores)
    columns = [work.add(node, aten.unsqueeze.default, one, 1, at=OWN) for one in (own, mine)]
    replace(node, work.add(node, aten.scatter.src, zeros, 1, *columns, at=Shard(1)))
    return True


def _slice(work: "Propagation", node: fx.Node) -> bool:
    """All of a cut dim, or some of another one."""
    x, dim = (*arguments(node), 0)[:2]
    where = work.at[x]
    if not isinstance(where, Shard):
        return False
    if g.shape(node) == g.shape(x):
        replace(node, x)
        return True
    if dim % len(g.shape(x)) == where.dim:
        return False
    work.at[node] = where
    return True


def _slice_scatter(work: "Propagation", node: fx.Node) -> bool:
    """The whole of a tensor written over; or some of its rows, of a tensor that is cut otherwise."""
    base, source, dim = arguments(node)[:3]
    if work.at[source] == REPLICATED:
        return False
    if g.shape(base) == g.shape(source):
        replace(node, source)
        return True
    where = work.at[source]
    if not isinstance(where, Shard) or where.dim == dim or not work.place_late(base, where):
        return False
    work.at[node] = where
    return True


def _index(work: "Propagation", node: fx.Node) -> bool:
    """Rows of a table whose columns are cut: T5's bias by heads."""
    x, places = arguments(node)
    where = work.at[x]
    if not isinstance(where, Shard) or where.dim == 0 or len(places) != 1 or work.at[places[0]] != REPLICATED:
        return False
    work.at[node] = Shard(where.dim - 1 + len(g.shape(places[0])), where.parts)
    return True


def _index_put(work: "Propagation", node: fx.Node) -> bool:
    base, places, values = arguments(node)[:3]
    where = work.at[values]
    if not isinstance(where, Shard) or len(places) != 1 or work.at[places[0]] != REPLICATED:
        return False
    dim = where.dim + 1 - len(g.shape(places[0]))
    if dim < 1 or not work.place_late(base, Shard(dim, where.parts)):
        return False
    work.at[node] = Shard(dim, where.parts)
    return True


def _columns(work: "Propagation", node: fx.Node) -> bool:
    """A look-up in a table whose columns are cut, and its gradient."""
    first, ids = arguments(node)[:2]
    where = work.at[first]
    if work.at[ids] != REPLICATED or not isinstance(where, Shard) or where.dim != len(g.shape(first)) - 1:
        return False
    work.at[node] = Shard(len(g.shape(node)) - 1, where.parts)
    return True


APART: dict[Any, Callable[["Propagation", fx.Node], bool]] = {
    aten.embedding.default: lambda work, node: _embedding(work, node) or _columns(work, node),
    aten.embedding_dense_backward.default: lambda work, node: (
        _embedding_backward(work, node) or _columns(work, node)
    ),
    aten.amax.default: _amax,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.gather.default: _gather,
    aten.scatter_add.default: _scatter_add,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
}
