"""How chips are wired: directed links with a bandwidth and a latency, and the way between two chips.

    torus((4, 4), bandwidth=128e9)              a link to each neighbour along each axis, ends joined
    switch(8, bandwidth=450e9)                  all to all through a switch, limited by each chip's own ports
    mesh(8, bandwidth=64e9)                     a link of its own for each pair of chips
    fat_tree(128, switch(8, 450e9), 400e9)      hosts like that, joined by their network adapters

Chips are the numbers 0 to n-1. A switch, the network adapters of a host and the network between hosts are
nodes too, with names, so that the number of links grows with the chips and not with their pairs.
Bandwidth: bytes a second, one way. Latency: seconds a message waits on a link before its first byte arrives,
or None where nobody gave one: then what needs it raises ValueError.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from fmlab.chips.routing import (
    CORE,
    DimensionOrder,
    Direct,
    FewestHops,
    Node,
    Rule,
    ThroughNetwork,
    ThroughSwitch,
    coordinates,
    network_node,
    number,
    shifted,
)

Edge = tuple[Node, Node]


@dataclass(frozen=True)
class Link:
    """One direction of a wire: bytes a second, and seconds until the first byte arrives (None: not known)."""

    bandwidth: float
    latency: float | None = None

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"a link's bandwidth is in bytes a second and above 0, not {self.bandwidth!r}")
        if self.latency is not None and not self.latency >= 0:
            raise ValueError(f"a link's latency is in seconds and not below 0: {self.latency!r}")


@dataclass(frozen=True)
class Topology:
    """Chips, other nodes, and the directed links between them.

    nodes: chips 0 to n-1 first, then the names of other nodes.
    links: (from, to) -> Link, each direction for itself.
    rule:  says the way between two chips; by default the one with the fewest links.
    hosts: the chips of each host; by default all are in one.
    """

    nodes: Sequence[Node] = field(repr=False)
    links: dict[Edge, Link] = field(repr=False, hash=False)
    rule: Rule | None = None
    hosts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    chips: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        chips = tuple(node for node in self.nodes if isinstance(node, int))
        if chips != tuple(range(len(chips))) or not chips:
            raise ValueError("the chips of a topology are the numbers 0 to n-1, at least one, in order")
        known = set(self.nodes)
        if len(known) != len(self.nodes):
            raise ValueError("a node is named twice")
        for a, b in self.links:
            if a not in known or b not in known or a == b:
                raise ValueError(
                    f"the link {a!r} -> {b!r} does not join two different nodes of this topology"
                )
        object.__setattr__(self, "chips", chips)
        object.__setattr__(self, "hosts", self.hosts or (chips,))
        if self.rule is None:
            ends = ((a, b, link.bandwidth) for (a, b), link in self.links.items())
            object.__setattr__(self, "rule", FewestHops(ends))

    def route(self, a: int, b: int) -> list[Edge]:
        """The directed links from chip a to chip b, in order: keys of `links`. Empty when a is b."""
        for chip in (a, b):
            if chip not in range(len(self.chips)):
                raise ValueError(f"there is no chip {chip!r}; the chips are 0 to {len(self.chips) - 1}")
        if a == b:
            return []
        assert self.rule is not None
        nodes = self.rule.path(a, b)
        return list(pairwise(nodes))

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes a second that one message from a to b can have: those of the narrowest link on its way."""
        return min(self.links[edge].bandwidth for edge in self.route(a, b))

    def latency(self, a: int, b: int) -> float:
        """Seconds until the first byte of a message from a arrives at b: the sum over the links on its way.

        Raises ValueError where the latency of one of them is not known.
        """
        total = 0.0
        for edge in self.route(a, b):
            latency = self.links[edge].latency
            if latency is None:
                raise ValueError(
                    f"no latency is known for the link {edge[0]!r} -> {edge[1]!r}: give one when making the "
                    f"topology (latency=; between hosts network_latency=)"
                )
            total += latency
        return total

    def seconds(self, a: int, b: int, nbytes: float) -> float:
        """Time of one message on empty links (modelled): latency, then the bytes at the narrowest link."""
        return self.latency(a, b) + nbytes / self.bandwidth(a, b)

    def outgoing(self, chip: int) -> float:
        """Bytes a second that a chip can send at most: its links to other chips or to a switch.

        What leads to the network adapters of its host is not counted.
        """
        networks = {network_node(host) for host in range(len(self.hosts))}
        leave = [link.bandwidth for (a, b), link in self.links.items() if a == chip and b not in networks]
        return sum(leave)

    def host_of(self, chip: int) -> int:
        """The number of the host that a chip belongs to."""
        return next(number for number, chips in enumerate(self.hosts) if chip in chips)


def ring(n: int, bandwidth: float, latency: float | None = None) -> Topology:
    """n chips in a circle, each linked to both neighbours. bandwidth: of one link, one way."""
    return torus((n,), bandwidth, latency)


def torus(
    shape: Sequence[int],
    bandwidth: float | Sequence[float],
    latency: float | None = None,
    wrap: bool | Sequence[bool] = True,
) -> Topology:
    """A grid of chips, each linked to its neighbours along every axis.

    shape: chips along each axis; chips are numbered with the last axis running fastest.
    bandwidth: of one link, one way; one number, or one for each axis.
    wrap: whether the ends of an axis are joined; one answer, or one for each axis. Two chips on an axis have
        one link between them either way.
    """
    shape = tuple(shape)
    if not shape or any(size < 1 for size in shape):
        raise ValueError(f"a torus has at least one chip along each axis, not {shape}")
    widths = _for_each_axis(bandwidth, shape, "bandwidth")
    wraps = _for_each_axis(wrap, shape, "wrap")
    links = {}
    for chip in range(prod(shape)):
        where = coordinates(chip, shape)
        for axis, size in enumerate(shape):
            for step in (1, -1):
                place = where[axis] + step
                if 0 <= place < size or (wraps[axis] and size > 2):
                    there = [*where[:axis], place % size, *where[axis + 1 :]]
                    links[chip, number(there, shape)] = Link(widths[axis], latency)
    rule = DimensionOrder(
        shape, tuple(bool(one) and size > 2 for one, size in zip(wraps, shape, strict=True))
    )
    return Topology(range(prod(shape)), links, rule)  # type: ignore[arg-type]


def switch(n: int, bandwidth: float, latency: float | None = None) -> Topology:
    """n chips on one switch that carries all they can send, as NVSwitch does.

    bandwidth: of a chip's ports together, one way: what a chip sends to all others shares it.
    latency: from chip to chip; it is put on the link to the switch, the link from the switch has none.
    """
    _count(n)
    links: dict[Edge, Link] = {(chip, "switch"): Link(bandwidth, latency) for chip in range(n)}
    links |= {("switch", chip): Link(bandwidth, 0.0) for chip in range(n)}
    return Topology([*range(n), "switch"], links, ThroughSwitch("switch"))


def mesh(n: int, bandwidth: float, latency: float | None = None) -> Topology:
    """n chips, a link for each pair, as eight MI300X have. bandwidth: of one such link, one way.

    Two chips alone can use one link of a chip's n-1, however many idle.
    """
    _count(n)
    links = {(a, b): Link(bandwidth, latency) for a in range(n) for b in range(n) if a != b}
    return Topology(range(n), links, Direct())  # type: ignore[arg-type]


def fat_tree(
    hosts: int,
    inside: Topology,
    network: float,
    latency: float | None = None,
    per_chip: float | None = None,
    hosts_in_group: int = 1,
) -> Topology:
    """Groups of chips wired like `inside`, joined by the network adapters of their hosts.

    hosts: hosts in all; a group has `hosts_in_group` of them (more than 1: an UltraServer, a TPU slice).
    network: bytes a second of a host's adapters together, one way. The network itself carries all of them at
        once (a fat tree without oversubscription).
    latency: from host to host, put on the link from the adapters into the network.
    per_chip: bytes a second between a chip and the adapters; by default each chip drives its own share of
        them, so that a host reaches all of `network` only when all of its chips send.
    """
    n = len(inside.chips)
    if hosts < 1 or hosts_in_group < 1 or hosts % hosts_in_group or n % hosts_in_group:
        raise ValueError(
            f"{hosts} hosts cannot be cut into groups of {hosts_in_group} with {n} chips: give a multiple"
        )
    groups, on_host = hosts // hosts_in_group, n // hosts_in_group
    share = Link(network / on_host if per_chip is None else per_chip, 0.0)
    names = [node for node in inside.nodes if not isinstance(node, int)]
    nodes: list[Node] = [*range(groups * n)]
    nodes += [shifted(name, 0, group) for group in range(groups) for name in names]
    links = {
        (shifted(a, group * n, group), shifted(b, group * n, group)): link
        for group in range(groups)
        for (a, b), link in inside.links.items()
    }
    for host in range(hosts):
        adapters = network_node(host)
        links[adapters, CORE], links[CORE, adapters] = Link(network, latency), Link(network, 0.0)
        for chip in range(host * on_host, (host + 1) * on_host):
            links[chip, adapters] = links[adapters, chip] = share
    assert inside.rule is not None
    members = tuple(tuple(range(host * on_host, (host + 1) * on_host)) for host in range(hosts))
    return Topology(
        [*nodes, *map(network_node, range(hosts)), CORE],
        links,
        ThroughNetwork(n, on_host, inside.rule),
        members,
    )


def _count(n: int) -> None:
    if n < 1:
        raise ValueError(f"a topology has at least one chip, not {n}")


def _for_each_axis(value: float | Sequence[float], shape: Sequence[int], name: str) -> tuple[float, ...]:
    values = (value,) * len(shape) if isinstance(value, int | float) else tuple(value)
    if len(values) != len(shape):
        raise ValueError(
            f"{name} has {len(values)} entries for {len(shape)} axes: one for each, or one for all"
        )
    return values
