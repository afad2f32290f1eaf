"""Before a step: do all ranks send the same collectives in the same order? If not, the step would hang."""

from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import fx

from fmlab.compiler import graph as g
from fmlab.compiler.capture import Program
from fmlab.compiler.distributed.collective import is_start


def check_collectives(program: Program, group: dist.ProcessGroup) -> int:
    """How many collectives of `group` a program's graphs hold, after comparing them with those of all ranks.

    Every rank of the group calls it, after the passes and before the first step. Raises ValueError on all of
    them, with the first difference, if they differ in number, order, dtype or size: ranks that captured other
    shapes or ran other passes.
    """
    mine = [
        f"{name} graph: {_described(node)}"
        for name, graph in program.graphs.items()
        for node in graph.nodes
        if is_start(node) and node.args[2] == group.group_name
    ]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    for number, calls in enumerate(zip_longest(*everyone, fillvalue="nothing")):
        if len(set(calls)) > 1:
            each = "; ".join(f"rank {rank} of the group: {call}" for rank, call in enumerate(calls))
            raise ValueError(f"collective {number} is not the same on all ranks: {each}. Run the same passes")
    return len(mine)


def _described(start: fx.Node) -> str:
    x = g.value(start)
    return f"{g.name(start)} ({start.args[1]}) of {x.numel()} {str(x.dtype).removeprefix('torch.')}"
