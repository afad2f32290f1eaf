"""Buckets as a pass: gradients that become ready one after the other travel as one message.

Each collective costs a latency, whatever its size; one collective for all gradients can only start when the
last of them is there. Buckets are in between (Li et al. 2020, arXiv:2006.15704, section 3.2.3).
"""

import operator

import torch
from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.distributed.collective import insert_sum, start_of, waits
from fmlab.compiler.passes.base import GraphPass, Report, insert

aten = torch.ops.aten


class Bucket(GraphPass):
    """Merges neighbouring gradient sums: flatten, one all-reduce, split.

    A gradient sum is one that only the caller reads. A bucket is closed when the next gradient would lift it
    over `nbytes`, or is of another group, dtype or device; a larger gradient has a bucket of its own. The
    gradients that come out are views of their bucket.

    Raises ValueError for a size that is not above 0.
    """

    name = "buckets"
    claims = (
        "the same sums; with three ranks or more, algorithms that cut a message into one piece a rank may "
        "add an element's parts in another order"
    )

    def __init__(self, nbytes: float):
        if not nbytes > 0:
            raise ValueError(f"a bucket of {nbytes} bytes holds nothing; legal: a number of bytes above 0")
        self.nbytes = nbytes

    def apply(self, graph: fx.Graph, report: Report) -> None:
        place = {node: i for i, node in enumerate(graph.nodes)}
        for bucket in self._plan(graph):
            if len(bucket) > 1:
                _merge(bucket, max(bucket, key=place.__getitem__))
                report.made["bucket"] += 1
                report.made["sum merged"] += len(bucket)
            elif _sent(bucket[0]) > self.nbytes:
                report.refused.append(f"{start_of(bucket[0])} is larger than a bucket and travels alone")

    def _plan(self, graph: fx.Graph) -> list[list[fx.Node]]:
        """The waits of each bucket, in the order in which they are sent."""
        plan: list[list[fx.Node]] = []
        size, kind = 0, None
        for wait in waits(graph):
            if not all(user.op == "output" for user in wait.users):
                continue
            mine = (*start_of(wait).args[1:], g.value(wait).dtype, g.value(wait).device)
            if not plan or size + _sent(wait) > self.nbytes or kind != mine:
                plan.append([])
                size, kind = 0, mine
            plan[-1].append(wait)
            size += _sent(wait)
        return plan


def _sent(wait: fx.Node) -> int:
    return g.nbytes(wait)


def _merge(bucket: list[fx.Node], last_wait: fx.Node) -> None:
    """One collective in the place of the bucket's last start, and views of its result for all readers."""
    last = start_of(bucket[-1])
    pieces = [_flat(last, start_of(wait).args[0]) for wait in bucket]
    together = insert(last, aten.cat.default, pieces)
    total = insert_sum(last, together, str(last.args[2]))
    last_wait.prepend(total)
    parts = insert(last_wait, aten.split_with_sizes.default, total, [g.value(p).numel() for p in pieces])
    for index, wait in enumerate(bucket):
        part = insert(last_wait, operator.getitem, parts, index)
        shaped = insert(last_wait, aten.view.default, part, list(g.shape(wait)))
        wait.replace_all_uses_with(shaped)
    for wait in bucket:
        start = start_of(wait)
        wait.graph.erase_node(wait)
        wait.graph.erase_node(start)


def _flat(before: fx.Node, gradient: object) -> fx.Node:
    """[n], the gradient's elements in the order of its dims."""
    assert isinstance(gradient, fx.Node)
    if not g.value(gradient).is_contiguous():
        gradient = insert(before, aten.clone.default, gradient, memory_format=torch.contiguous_format)
    return insert(before, aten.view.default, gradient, [-1])
