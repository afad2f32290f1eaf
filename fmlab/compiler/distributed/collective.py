"""A collective in a graph is two nodes: its start, which sends, and its wait, after which the sum is there.

    total = all_reduce(part, sum, group)      returns at once
    ...                                       whatever stands here runs while the sum travels
    ready = wait_tensor(total)

They are torch's functional collectives. The start copies what it sends, so its input may be freed at once.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the shapes of the two operators
from torch import fx

from fmlab.compiler import graph as g

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

#: Ranks that add up: a process group, a function that gives one, or a group's name.
Group = dist.ProcessGroup | Callable[[], dist.ProcessGroup] | str


def group_name(group: Group) -> str:
    """The name under which torch's operators find a group.

    A name is taken as it is, so that graphs can be made and looked at where no group exists. Raises
    ValueError for anything but a group, a function that gives one, and a name.
    """
    if isinstance(group, str) and group:
        return group
    found = group() if callable(group) else group
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            f"group is {found!r}; legal: a process group such as torch.distributed.group.WORLD (after "
            "init_process_group), a function that returns one, or a group's name for a graph that is not run"
        )
    return str(found.group_name)


def is_start(node: fx.Node) -> bool:
    """Whether the node begins a sum over ranks."""
    return node.target is ALL_REDUCE


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a sum over ranks."""
    return node.target is WAIT


def start_of(wait: fx.Node) -> fx.Node:
    """The node that began what `wait` waits for."""
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    return start


def waits(graph: fx.Graph) -> Iterator[fx.Node]:
    """The waits for sums over ranks, in the order of their starts."""
    for node in list(graph.nodes):
        if is_start(node):
            yield from (user for user in list(node.users) if is_wait(user))


def insert_sum(before: fx.Node, x: fx.Node, name: str, how: str = "sum") -> fx.Node:
    """Start and wait of the sum of `x` over the group `name`, in front of `before`; the wait.

    how: "sum", or "max" for the largest of the ranks.
    """
    total = g.value(x).new_empty(g.shape(x))  # contiguous, whatever the order of dims of what is sent
    with before.graph.inserting_before(before):
        start = before.graph.create_node("call_function", ALL_REDUCE, (x, how, name), name="all_reduce")
        wait = before.graph.create_node("call_function", WAIT, (start,), name="wait")
    start.meta["val"] = wait.meta["val"] = total
    return wait


def following(node: fx.Node) -> fx.Node:
    """In front of which node something stands right behind `node`; inputs stay in front of all."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after


def summed_over(node: fx.Node) -> set[str]:
    """Names of the groups over which a value is a sum, as far as it is only shown otherwise since."""
    found = set()
    while node.op == "call_function" and (g.is_view(node) or is_start(node)):
        if is_start(node):
            found.add(str(node.args[2]))
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return found
