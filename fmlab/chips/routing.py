"""Which way a message takes: rules that name the nodes from one chip to another, ends included.

A rule is a small object, not a table: a table for 1,024 chips would have a million rows.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

Node = Hashable


class Rule(Protocol):
    """Anything that says the way from chip a to chip b."""

    def path(self, a: int, b: int) -> list[Node]: ...


@dataclass(frozen=True)
class Direct:
    """Every chip is joined to every other."""

    def path(self, a: int, b: int) -> list[Node]:
        return [a, b]


@dataclass(frozen=True)
class ThroughSwitch:
    """Every chip is joined to one switch."""

    switch: Node

    def path(self, a: int, b: int) -> list[Node]:
        return [a, self.switch, b]


@dataclass(frozen=True)
class DimensionOrder:
    """Along the first axis until it agrees, then along the next: the usual rule of a torus.

    On an axis that wraps the shorter way is taken; when both are as long, the one of rising coordinates.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]

    def path(self, a: int, b: int) -> list[Node]:
        here, there = coordinates(a, self.shape), coordinates(b, self.shape)
        nodes: list[Node] = [a]
        for axis, size in enumerate(self.shape):
            for _ in range(size):
                if here[axis] == there[axis]:
                    break
                here[axis] = (here[axis] + self._step(here[axis], there[axis], axis)) % size
                nodes.append(number(here, self.shape))
        return nodes

    def _step(self, here: int, there: int, axis: int) -> int:
        size = self.shape[axis]
        if not self.wrap[axis]:
            return 1 if there > here else -1
        return 1 if (there - here) % size <= size / 2 else -1


@dataclass(frozen=True)
class ThroughNetwork:
    """Inside a group of chips by the group's own rule, between groups through the hosts' network nodes.

    group: chips in a group; host: chips of one host; names: of the network node of a host, and of the core.
    """

    group: int
    host: int
    inside: Rule

    def path(self, a: int, b: int) -> list[Node]:
        if a // self.group == b // self.group:
            first = a - a % self.group
            nodes = self.inside.path(a - first, b - first)
            return [shifted(node, first, a // self.group) for node in nodes]
        return [a, network_node(a // self.host), CORE, network_node(b // self.host), b]


class FewestHops:
    """Any graph: the way with the fewest links; of those, the one whose narrowest link is widest."""

    def __init__(self, links: Iterable[tuple[Node, Node, float]]) -> None:
        self.neighbours: dict[Node, list[tuple[Node, float]]] = {}
        for a, b, bandwidth in links:
            self.neighbours.setdefault(a, []).append((b, bandwidth))
        self._found: dict[Node, dict[Node, tuple[int, float, Node]]] = {}

    def path(self, a: int, b: int) -> list[Node]:
        if a not in self._found:
            self._found[a] = self._search(a)
        if b not in self._found[a]:
            raise ValueError(f"no links lead from {a!r} to {b!r}")
        nodes: list[Node] = [b]
        while nodes[-1] != a:
            nodes.append(self._found[a][nodes[-1]][2])
        return nodes[::-1]

    def _search(self, start: Node) -> dict[Node, tuple[int, float, Node]]:
        """node -> (links from start, bandwidth of the narrowest, node before)."""
        found: dict[Node, tuple[int, float, Node]] = {start: (0, float("inf"), start)}
        queue = deque([start])
        while queue:
            here = queue.popleft()
            hops, width, _ = found[here]
            for there, bandwidth in self.neighbours.get(here, ()):
                offer = (hops + 1, min(width, bandwidth), here)
                if there not in found:
                    queue.append(there)
                    found[there] = offer
                elif found[there][0] == offer[0] and found[there][1] < offer[1]:
                    found[there] = offer
        return found


CORE = "core"


def network_node(host: int) -> str:
    """The name of the node that stands for the network adapters of a host."""
    return f"network{host}"


def shifted(node: Node, first: int, group: int) -> Node:
    """The name in the whole of a node of group number `group`, whose chips begin at `first`."""
    return node + first if isinstance(node, int) else f"{node}/{group}"


def coordinates(chip: int, shape: tuple[int, ...]) -> list[int]:
    """Where a chip stands in a grid: the last axis runs fastest."""
    where = []
    for size in reversed(shape):
        chip, place = divmod(chip, size)
        where.append(place)
    return where[::-1]


def number(where: Iterable[int], shape: tuple[int, ...]) -> int:
    """The chip at a place in a grid."""
    chip = 0
    for place, size in zip(where, shape, strict=True):
        chip = chip * size + place
    return chip
