"""What messages cost between the chips of a cluster: by fmlab.collectives, on a topology or as measured."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from fmlab.chips import Topology, cluster, host, hosts
from fmlab.chips.topology import Link
from fmlab.collectives.cost import seconds
from fmlab.collectives.machines import Machine, machine

#: Chips whose 8-chip hosts have measured collectives: fmlab.collectives.machines
MEASURED = {"a100-40gb": "a100", "a100-80gb": "a100", "h200": "h200", "b200": "p6-b200"}


class Fabric:
    """Prices of messages; equal questions are answered once.

    topology: of all chips, in the order of the ranks
    measured: fitted to runs on one host of this kind; used for groups inside a host where it covers them
    notes:    what was assumed
    """

    def __init__(
        self, topology: Topology, measured: Machine | None = None, notes: Sequence[str] = ()
    ) -> None:
        self.topology, self.measured, self.notes = topology, measured, tuple(notes)
        self.host_of = {chip: number for number, chips in enumerate(topology.hosts) for chip in chips}
        self._collective = lru_cache(maxsize=None)(self._price)
        self._send = lru_cache(maxsize=None)(topology.seconds)

    def collective(
        self, name: str, payload: int, group: Sequence[int], beside: Sequence[Sequence[int]] = ()
    ) -> float:
        """Modelled seconds of a collective in `group`, while the groups of `beside` do the same.

        payload: bytes of the whole tensor. Groups in `beside` that share no host with `group` cost nothing.
        """
        if len(group) == 1:
            return 0.0
        mine = {self.host_of[rank] for rank in group}
        near = [tuple(other) for other in beside if len(mine) > 1 and mine & {self.host_of[r] for r in other}]
        return self._collective(name, payload, tuple(group), tuple(near))

    def _price(
        self, name: str, payload: int, group: tuple[int, ...], beside: tuple[tuple[int, ...], ...]
    ) -> float:
        if self.measured is not None and len({self.host_of[rank] for rank in group}) == 1:
            try:
                return self.measured.seconds(name, payload, len(group))
            except ValueError:
                pass  # a collective or a number of ranks that was not measured
        return seconds(name, payload, self.topology, ranks=group, beside=beside)

    def send(self, source: int, destination: int, payload: int) -> float:
        """Modelled seconds of one message on links that nothing else uses."""
        return self._send(source, destination, payload)

    def links(self, group: Sequence[int]) -> str:
        """Where a group's messages travel, for people."""
        count = len({self.host_of[rank] for rank in group})
        return "inside a host" if count == 1 else f"between {count} hosts"


def host_fabric(
    host_name: str,
    chips: int,
    measured: bool = False,
    link_latency: float | None = None,
    network_latency: float | None = None,
    network_bandwidth: float | None = None,
) -> Fabric:
    """The fabric of so many chips in whole hosts of one kind.

    measured: price collectives inside a host by fits to measured runs, where there are any.
    link_latency, network_latency [s], network_bandwidth [B/s, one way, per host]: instead of the published
    ones. A latency that neither a source nor the caller gives counts as 0, and `notes` says so.
    Raises ValueError for an unknown host, or for chips that do not fill whole hosts.
    """
    one = host(host_name)
    count, rest = divmod(chips, one.chips)
    if rest and count:
        raise ValueError(
            f"{chips} chips do not fill whole hosts of {host_name} with {one.chips}; "
            f"use {count * one.chips} or {(count + 1) * one.chips}"
        )
    made = cluster(
        host_name,
        max(count, 1),
        latency=link_latency,
        network_latency=network_latency,
        network_bandwidth=network_bandwidth,
    )
    notes = []
    if any(link.latency is None for link in made.links.values()):
        notes.append(
            f"no source gives every latency of {host_name} x {max(count, 1)}: the unknown ones count as 0 s "
            "(link_latency=, network_latency= set them)"
        )
        links = {e: Link(k.bandwidth, 0.0) if k.latency is None else k for e, k in made.links.items()}
        made = replace(made, links=links)
    if network_bandwidth is not None:
        notes.append(f"network of a host: {network_bandwidth / 1e9:g} GB/s one way, as given")
    fit = machine(MEASURED[one.chip.name]) if measured and one.chip.name in MEASURED else None
    if fit is not None:
        notes.append(f"collectives inside a host as fitted to measured runs: {fit.title}")
    return Fabric(made, fit, notes)


def need_host(chip_name: str, chips: int) -> ValueError:
    """The error for several chips without wires; it names the hosts that have this chip."""
    try:
        known = ", ".join(hosts(chip_name))
    except ValueError:  # a chip of the caller's own
        known = ""
    choice = f"host= one of {known}, or " if known else ""
    return ValueError(
        f"{chips} chips of {chip_name} need to be told how they are wired: give {choice}chip= and topology="
    )
