"""A chip with its wires and a calibration: the rates that the formulas of time ask for.

hardware("a100-80gb")                        on hosts of a usual kind
hardware("h100", host="p5.48xlarge", network_bandwidth=4e11, calibration=Calibration(memory=0.7))
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fmlab.chips import Chip
from fmlab.chips import chip as find_chip
from fmlab.chips import host as find_host
from fmlab.chips import hosts as all_hosts
from fmlab.parallel.values import above_zero
from fmlab.planner.calibration import Calibration, fitted
from fmlab.planner.wires import Wires, wires_of


@dataclass(frozen=True)
class Hardware:
    """chip: of each rank (a core, where `chip.unit` says so). wires: None for a chip without a known host."""

    chip: Chip
    wires: Wires | None
    calibration: Calibration
    host: str | None = None

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal where times are."""
        one = self.calibration
        tables = (tuple(sorted(one.matmul.items())), tuple(sorted(one.attention_of.items())))
        return (self.chip.name, self.wires, one, *tables)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second that passes over tensors reach."""
        return self.chip.memory_bandwidth * self.calibration.memory

    @cached_property
    def eager(self) -> bool:
        """Whether the host starts each kernel by itself."""
        return self.chip.compiler == "eager"

    @cached_property
    def capacity(self) -> int | None:
        """Bytes of the chip's memory; None where no source gives it."""
        return self.chip.memory_bytes if "memory" in self.chip.figures() else None

    @cached_property
    def devices(self) -> int:
        """Ranks that a chip is: 2 for the cores of a Trainium, which are bought by the chip."""
        return 1 if self.host is None else find_host(self.host).devices_of_a_chip(self.chip)

    @cached_property
    def host_ranks(self) -> int:
        """Ranks of a host; 1 where no host is known."""
        return 1 if self.host is None else find_host(self.host).chips * self.devices

    def whole_chips(self, ranks: int) -> int:
        """Chips that so many ranks take."""
        return -(-ranks // self.devices)

    @cached_property
    def _peaks(self) -> dict[str, float]:
        return {}

    def peak(self, precision: str) -> float:
        """FLOPs a second as published, dense. Raises ValueError for a type without a peak."""
        if precision not in self._peaks:
            self._peaks[precision] = self.chip.peak_flops(precision)
        return self._peaks[precision]

    @cached_property
    def _rates(self) -> dict[str, float]:
        return {}

    def rate(self, precision: str) -> float:
        """FLOPs a second of large matrix products in this type."""
        if precision not in self._rates:
            share = self.calibration.matmul_share(self.chip, precision)
            self._rates[precision] = self.chip.peak_flops(precision) * share
        return self._rates[precision]

    # region product
    def product(self, rows: float, inputs: float, outputs: float, precision: str) -> float:
        """Seconds of a matrix product: 2 FLOPs a row and element at the rate that its sides allow, or as
        long as its operands take to come and go."""
        one = self.calibration
        narrow = min(inputs, outputs)
        reached = rows / (rows + one.rows_half) * narrow / (narrow + one.width_half)
        if narrow >= 64 and narrow % 64:
            reached *= one.misaligned
        flops = 2.0 * rows * inputs * outputs / (self.rate(precision) * reached)
        moved = 2.0 * (rows * (inputs + outputs) + inputs * outputs) / self.bandwidth
        return max(flops, moved)

    # endregion

    def need_wires(self, ranks: int) -> Wires:
        """The wires; ValueError, with the hosts there are, for several chips that nothing known joins."""
        if self.wires is None:
            raise ValueError(
                f"{ranks} chips of {self.chip.name} need to be told how they are wired, and no host with it "
                f"is known: give host= one of {', '.join(all_hosts())}"
            )
        return self.wires


def hardware(
    chip: str | Chip | None = None,
    host: str | None = None,
    network_bandwidth: float | None = None,
    calibration: Calibration | None = None,
) -> Hardware:
    """A chip, by name or as a Chip, in hosts of a kind (default: the first with a network and many chips).

    network_bandwidth: bytes a second of a host, one way, instead of the published figure.
    calibration: default: what was fitted to published runs.

    Raises ValueError for unknown names, and for a host that has other chips.
    """
    one = fitted() if calibration is None else calibration
    if not isinstance(one, Calibration):
        raise ValueError(f"calibration={calibration!r}: give a fmlab.planner.Calibration")
    if chip is None and host is None:
        raise ValueError("give chip= (a100-80gb, h100, tpu-v5p, trn2, …) or host= (p5.48xlarge, …)")
    if isinstance(chip, Chip):
        return Hardware(chip, None if host is None else _wires(chip, host, network_bandwidth), one, host)
    device = find_host(str(host)).chip if chip is None else find_chip(chip)
    host = host or usual_host(device)
    return Hardware(device, None if host is None else _wires(device, host, network_bandwidth), one, host)


@lru_cache(maxsize=256)
def usual_host(chip: Chip) -> str | None:
    """The first host with this chip (or of which this is a core), many chips and a known network."""
    names = all_hosts(chip.of or chip.name)
    found = [name for name in names if find_host(name).chips > 1]
    networked = [name for name in found if "network_bandwidth" in find_host(name).figures()]
    return next(iter((*networked, *found, *names)), None)


def _wires(chip: Chip, host: str, network_bandwidth: float | None) -> Wires:
    one = find_host(host)
    if one.chip.name not in (chip.name, chip.of):
        legal = ", ".join(all_hosts(chip.of or chip.name)) or "none"
        raise ValueError(f"{host} has {one.chip.name}, not {chip.name}; hosts with it: {legal}")
    if network_bandwidth is not None:
        given = f"network_bandwidth={network_bandwidth!r}"
        above_zero(network_bandwidth, given, "give bytes a second of a host, above 0")
    wires = wires_of(host, network_bandwidth)
    cores = (one.chip.cores or 1) // (chip.cores or 1) if chip.unit == "core" else 1
    if cores == 1:
        return wires
    return replace(  # a core has its part of its chip's links
        wires,
        island=wires.island * cores,
        inside=wires.inside / cores,
        link=wires.link / cores,
        between=None if wires.between is None else wires.between / cores,
    )
