"""Hosts: their chips, how these are wired, what joins hosts, what an hour costs; and clusters of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Literal

from fmlab.chips.catalogue import chip, cite, read_figure, read_table, unknown
from fmlab.chips.chip import Chip
from fmlab.chips.figures import Figure
from fmlab.chips.slices import check_shape, slice_shape, wraps
from fmlab.chips.topology import Link, Topology, fat_tree, mesh, ring, switch, torus


@dataclass(frozen=True)
class Price:
    """Dollars an hour, on a day and in a region.

    per: what the price is for, a whole "host" or one "chip"
    kind: "on-demand", "capacity block", "reserved, effective" or "list"
    """

    usd_per_hour: float
    per: Literal["host", "chip"]
    kind: str
    region: str
    date: str
    source: str


@dataclass(frozen=True)
class Host:
    """One host. `prices` is empty where no source gives one.

    fabric, group: how the chips are wired in a host, and in the hosts that the chips' own links join
    """

    name: str
    title: str
    chip: Chip
    chips: int
    fabric: Mapping[str, Any] = field(repr=False, hash=False)
    group: Mapping[str, Any] = field(repr=False, hash=False)
    table: Mapping[str, Figure] = field(repr=False, hash=False)
    prices: tuple[Price, ...] = ()

    def figures(self) -> dict[str, Figure]:
        """Its own figures by name: "network_bandwidth" and "network_latency", where a source gives them."""
        return dict(self.table)

    @property
    def network_bandwidth(self) -> float:
        """Bytes a second to other hosts, one way. ValueError where no source gives it."""
        if "network_bandwidth" not in self.table:
            raise ValueError(
                f"no source gives the network of {self.name}: pass network_bandwidth= (bytes a second)"
            )
        return self.table["network_bandwidth"].base

    @property
    def network_latency(self) -> float | None:
        """Seconds from host to host, or None where no source gives them."""
        figure = self.table.get("network_latency")
        return None if figure is None else figure.base

    def devices_of_a_chip(self, device: Chip) -> int:
        """How many of these devices one of its chips is: 2 for the cores of a Trainium, 1 for whole chips."""
        return (self.chip.cores or 1) // (device.cores or 1) if device.unit == "core" else 1

    def usd_per_chip_hour(self, kind: str | None = None) -> float:
        """Dollars for one chip and hour. kind: of price; the first one by default.

        Raises ValueError when no such price is known.
        """
        for price in self.prices:
            if kind in (None, price.kind):
                return price.usd_per_hour / (self.chips if price.per == "host" else 1)
        kinds = ", ".join(price.kind for price in self.prices) or "none"
        raise ValueError(
            f"no price of {self.name} of the kind {kind or 'any'} is known; known kinds: {kinds}"
        )

    def topology(self, latency: float | None = None) -> Topology:
        """The chips of one host and their links. latency: seconds of a link; by default the published."""
        return _fabric(self, 1, None, latency)


def host(name: str) -> Host:
    """The host called `name`: host("p5.48xlarge"). Raises ValueError for an unknown one, with a list."""
    known = _all()
    if name not in known:
        raise ValueError(unknown("host", name, known))
    return known[name]


def hosts(chip_name: str | None = None) -> list[str]:
    """The names of all hosts, or of those with a given chip."""
    if chip_name is not None:
        chip(chip_name)
    return [name for name, one in _all().items() if chip_name in (None, one.chip.name)]


def cluster(
    host_name: str,
    count: int,
    shape: Sequence[int] | None = None,
    latency: float | None = None,
    network_latency: float | None = None,
    network_bandwidth: float | None = None,
) -> Topology:
    """All chips of `count` hosts of one kind, with every link.

    Hosts that the chips' own links join (a TPU slice, an UltraServer, an NVL72) are wired as one; larger
    clusters are groups of those, or single hosts, in a fat tree between their network adapters.
    shape: of a TPU slice; the most even one by default.
    latency, network_latency: seconds of one link and from host to host. By default those that a source gives;
        None where none does, and then a time cannot be computed.
    network_bandwidth: bytes a second of a host, one way, where the published figure is missing or not wanted.
    """
    one = host(host_name)
    if count < 1:
        raise ValueError(f"a cluster has at least one host, not {count}")
    most = _hosts_in_group(one)
    if count <= most:
        return _fabric(one, count, shape, latency)
    if shape is not None:
        raise ValueError(f"{count} hosts of {host_name} are more than one slice of {most}: leave shape= out")
    if count % most:
        raise ValueError(
            f"{host_name} comes in groups of {most} hosts, beyond that give a multiple, not {count}"
        )
    return fat_tree(
        hosts=count,
        inside=_fabric(one, most, None, latency),
        network=one.network_bandwidth if network_bandwidth is None else network_bandwidth,
        latency=one.network_latency if network_latency is None else network_latency,
        hosts_in_group=most,
    )


def _hosts_in_group(one: Host) -> int:
    """The most hosts that the chips' own links join."""
    if "largest" in one.group:
        return int(one.group["largest"]) // one.chips
    if "pod" in one.group:
        return prod(one.group["pod"]) // one.chips
    if "chips" in one.group:
        return int(one.group["chips"]) // one.chips
    return int(one.group.get("hosts", 1))


def _fabric(one: Host, count: int, shape: Sequence[int] | None, latency: float | None) -> Topology:
    """The topology of `count` hosts that the chips' own links join."""
    kind, chips = one.fabric["kind"], one.chips * count
    if latency is None and "link_latency" in one.chip.figures():
        latency = one.chip.figure("link_latency").base
    if shape is not None and "wrap" not in one.group:
        raise ValueError(f"shape= is for TPU slices; {one.name} is always wired the same way")
    if kind == "switch":
        made = switch(chips, one.chip.link_bandwidth, latency)
    elif kind == "graph":
        return _graph(one, latency)
    else:
        link = one.chip.figure("per_link").base
        if kind == "mesh":
            made = mesh(chips, link, latency)
        elif kind == "ring":
            made = ring(chips, link, latency)
        elif "wrap" in one.group:
            made = _slice(one, chips, shape, link, latency)
        else:
            made = _torus(one, count, link, latency)
    members = tuple(tuple(range(first, first + one.chips)) for first in range(0, chips, one.chips))
    return Topology(made.nodes, made.links, made.rule, members)


def _slice(
    one: Host, chips: int, shape: Sequence[int] | None, link: float, latency: float | None
) -> Topology:
    """A TPU slice. Hosts are taken as runs of chip numbers: right up to the order of the numbering."""
    pod, block = one.group.get("pod"), one.fabric["shape"]
    if shape is None:
        shape = slice_shape(chips, block, pod)
    check_shape(shape, chips, pod)
    return torus(shape, link, latency, wraps(shape, pod, one.group["wrap"]))


def _torus(one: Host, count: int, link: float, latency: float | None) -> Topology:
    """Trainium: a torus in a host; the hosts of an UltraServer add an axis with links of its own."""
    if count == 1:
        return torus(one.fabric["shape"], link, latency)
    if count != one.group["hosts"]:
        raise ValueError(f"{one.name} comes alone or in groups of {one.group['hosts']} hosts, not {count}")
    between = one.chip.figure("per_link.between_hosts").base
    return torus(one.group["shape"], (between, link, link), latency)


def _graph(one: Host, latency: float | None) -> Topology:
    """Links listed pair by pair: those in `one` are a single wire, those in `two` a double one."""
    wire = one.chip.figure("per_link").base
    links = {
        edge: Link(times * wire, latency)
        for times, key in ((1, "one"), (2, "two"))
        for a, b in one.fabric[key]
        for edge in ((a, b), (b, a))
    }
    return Topology(range(one.chips), links)


@cache
def _all() -> dict[str, Host]:
    return {name: _host(name, row) for name, row in read_table("hosts").items()}


def _host(name: str, row: Mapping[str, Any]) -> Host:
    table = {}
    for key, wanted in (("network", "network_bandwidth"), ("network_latency", "network_latency")):
        if key in row:
            table[wanted] = read_figure(row[key])
    return Host(
        name=name,
        title=row["title"],
        chip=chip(row["chip"]),
        chips=row["chips"],
        fabric={**row["fabric"], "source": cite(row["fabric"]["source"])},
        group=row.get("group", {}),
        table=table,
        prices=tuple(_price(price) for price in row.get("prices", ())),
    )


def _price(row: Mapping[str, Any]) -> Price:
    per: Literal["host", "chip"] = "chip" if row["kind"].endswith(", per chip") else "host"
    kind = row["kind"].removesuffix(", per chip")
    return Price(row["value"], per, kind, row["region"], row["date"], cite(row["source"]))
