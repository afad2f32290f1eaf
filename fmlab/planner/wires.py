"""What messages cost between the chips of a cluster, by formula: in microseconds, for any number of chips.

    wires = wires_of("p4de.24xlarge")
    wires.seconds("all_reduce", payload, Group(8, 1, 8), calibration)

A cluster is islands of chips that their own links join (a host, an UltraServer, a TPU slice), joined by the
network of the hosts. A group of ranks has `near` members in each island it touches. A collective over several
islands works in two phases, inside and between, on different pieces at the same time: their latencies add up,
and the slower one's bytes decide (Thakur et al. 2005; NCCL's rings and trees; the hierarchical algorithm of
fmlab.collectives). The formulas of one phase are those of fmlab.collectives.closed_form: a ring, or half as
far each time where that is faster. Every message is priced as if all groups of a kind talked at once, so each
chip has its own share of the host's network.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fmlab.chips import Host
from fmlab.chips import host as find_host
from fmlab.collectives import closed_form
from fmlab.planner.calibration import Calibration

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Group:
    """size: ranks that talk. stride: the distance of their numbers. near: how many share an island."""

    size: int
    stride: int
    near: int

    @property
    def islands(self) -> int:
        return self.size // self.near


@dataclass(frozen=True)
class Wires:
    """island: chips that their own links join. inside: bytes a second that a chip sends there, all links.

    kind: "switch", "mesh" or "torus"; axes: of a torus, the last running fastest; link: bytes a second of one
    of its links. between: bytes a second of a chip's share of its host's network; None where no source gives
    it. All one way.
    """

    name: str
    island: int
    kind: str
    inside: float
    between: float | None
    axes: tuple[int, ...] = ()
    link: float = 0.0

    def group(self, size: int, stride: int) -> Group:
        """`size` ranks whose numbers are `stride` apart."""
        room = max(1, self.island // stride)
        near = size if size <= room else max(n for n in range(1, room + 1) if size % n == 0)
        return Group(size, stride, near)

    def seconds(self, collective: str, payload: float, group: Group, calibration: Calibration) -> float:
        """Modelled seconds of a collective. payload: bytes of the whole tensor, as in fmlab.collectives."""
        if group.size == 1 or payload == 0:
            return 0.0
        if collective == "all_to_all":
            return self._all_to_all(payload, group, calibration)
        near, far = group.near, group.islands
        inside = between = 0.0
        waits = 0.0
        if near > 1:
            rate = self._rate(group) * calibration.inside
            inside, wait = _phase(collective, near, payload, calibration.hop_inside, rate)
            waits += wait
        if far > 1:
            rate = self._network() * calibration.between
            between, wait = _phase(collective, far, payload / near, calibration.hop_between, rate)
            waits += wait
        return waits + max(inside, between)

    def send(self, payload: float, stride: int, size: int, calibration: Calibration) -> float:
        """Modelled seconds of a message to the next of `size` ranks that are `stride` apart."""
        if stride * size <= self.island or (stride < self.island and self.island % (stride * size) == 0):
            rate = (self.link if self.kind == "torus" else self.inside) * calibration.inside
            return calibration.hop_inside + payload / rate
        return calibration.hop_between + payload / (self._network() * calibration.between)

    def _all_to_all(self, payload: float, group: Group, calibration: Calibration) -> float:
        """payload: what one rank hands in. On a torus an average message goes a quarter of the way round."""
        n, near = group.size, group.near
        inside = between = 0.0
        if near > 1:
            rate = self._rate(group) * calibration.inside
            longer = max(1.0, near / 4) if self.kind == "torus" else 1.0
            inside = payload * (near - 1) / n * longer / rate
        if group.islands > 1:
            between = payload * (n - near) / n / (self._network() * calibration.between)
        hop = calibration.hop_between if group.islands > 1 else calibration.hop_inside
        return hop + max(inside, between)

    def _rate(self, group: Group) -> float:
        """Bytes a second that a chip of a group sends inside its island."""
        if self.kind == "switch":
            return self.inside
        if self.kind == "mesh":  # only the links to the other members
            return self.inside * (group.near - 1) / (self.island - 1)
        return 2 * self.link * _axes_of(self.axes, group.near, group.stride)

    def _network(self) -> float:
        if self.between is None:
            raise ValueError(
                f"no source gives the network of {self.name}: pass network_bandwidth= (bytes a second of a "
                f"host, one way), or use at most the {self.island} chips that their own links join"
            )
        return self.between


@lru_cache(maxsize=4096)
def _closed(collective: str, algorithm: str, n: int) -> tuple[int, float]:
    one = closed_form(collective, algorithm, n)
    return one.steps, one.volume


def _phase(collective: str, n: int, payload: float, hop: float, rate: float) -> tuple[float, float]:
    """(seconds of the bytes, seconds of waiting) of the faster of two algorithms."""
    found = []
    for algorithm in ("ring", "halving_doubling"):
        steps, volume = _closed(collective, algorithm, n)
        found.append((volume * payload / rate, steps * hop))
    return min(found, key=sum)


@lru_cache(maxsize=4096)
def _axes_of(axes: tuple[int, ...], near: int, stride: int) -> int:
    """How many axes of a torus a group of neighbours spreads over, 1 at least."""
    used = 0
    for axis in reversed(axes):
        if stride >= axis:
            stride //= axis
            continue
        if near > 1 and axis > 1:
            used += 1
            near = -(-near * stride // axis)
            stride = 1
    return max(used, 1)


@lru_cache(maxsize=256)
def wires_of(host_name: str, network_bandwidth: float | None = None) -> Wires:
    """The wires of hosts of one kind. network_bandwidth: bytes a second of a host, one way, instead of the
    published figure. Raises ValueError for an unknown host, and for links that no source gives."""
    one = find_host(host_name)
    island, axes = _island(one)
    kind = str(one.fabric["kind"])
    kind = "torus" if kind in ("ring", "torus", "graph") else kind
    network = network_bandwidth
    if network is None and "network_bandwidth" in one.figures():
        network = one.network_bandwidth
    figures = one.chip.figures()
    link = figures["per_link"].base if "per_link" in figures else 0.0
    if kind == "torus" and not link:
        kind = "switch"
    inside = one.chip.link_bandwidth if island > 1 else 0.0
    return Wires(
        host_name, island, kind, inside, None if network is None else network / one.chips, axes, link
    )


def _island(one: Host) -> tuple[int, tuple[int, ...]]:
    """Chips that the chips' own links join at most, and the axes of their torus."""
    group = one.group
    if "pod" in group:
        largest = int(group.get("largest", prod(group["pod"])))
        return largest, tuple(group["pod"])
    if "chips" in group:
        side = round(int(group["chips"]) ** (1 / 3))
        return int(group["chips"]), (side,) * int(group.get("axes", 1))
    if "hosts" in group:
        chips = int(group["hosts"]) * one.chips
        return chips, tuple(group.get("shape", (chips,)))
    return one.chips, tuple(one.fabric.get("shape", (one.chips,)))
