"""What a search is asked for, checked before it starts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fmlab.chips import host as find_host
from fmlab.parallel.values import above_zero, one_of, whole
from fmlab.planner.hardware import Hardware
from fmlab.planner.setup import ACTIVATIONS, ATTENTION, LOGITS, PRECISIONS, STATES
from fmlab.planner.space import CHOSEN

OBJECTIVES = ("time", "dollars", "chips")
MOST_CHIPS = 2**20


@dataclass(frozen=True)
class Wanted:
    """What a search looks for.

    memory: bytes of a chip that may be used. at_most: seconds of a step, or None. keep: how many plans.
    usd_per_chip_hour: of every rank that is paid for (half of a chip's where a rank is one of its two cores);
    host_chips: ranks are paid for in hosts of so many.
    """

    objective: str
    memory: float
    at_most: float | None
    keep: int
    usd_per_chip_hour: float | None
    host_chips: int

    def score(self, chips: int, seconds: float) -> tuple[float, ...]:
        """What is to be small, the more important first."""
        if self.objective == "chips":
            return (chips, seconds)
        return (self.usd(chips, seconds), seconds) if self.objective == "dollars" else (seconds,)

    def usd(self, chips: int, seconds: float) -> float:
        """Dollars of a step. Raises ValueError without a price."""
        if self.usd_per_chip_hour is None:
            raise ValueError("no price is known: give usd_per_chip_hour=")
        paid = -(-chips // self.host_chips) * self.host_chips
        return paid * seconds / 3600 * self.usd_per_chip_hour


def usable_memory(machine: Hardware, given: float | None) -> float:
    if given is not None:
        return above_zero(given, f"memory={given!r}", "give bytes of a chip above 0")
    if machine.capacity is None:
        raise ValueError(f"no source gives the memory of {machine.chip.name}: give memory= (bytes of a chip)")
    return float(machine.capacity)


def price(machine: Hardware, objective: str, given: float | None) -> float | None:
    """Dollars of a rank and hour; `given` and the host's are those of a whole chip."""
    if given is not None:
        return above_zero(given, f"usd_per_chip_hour={given!r}", "give dollars above 0") / machine.devices
    if machine.host is not None and find_host(machine.host).prices:
        return find_host(machine.host).usd_per_chip_hour() / machine.devices
    if objective == "dollars":
        raise ValueError(f"objective='dollars': no price of {machine.host} is known; give usd_per_chip_hour=")
    return None


def counts_of(machine: Hardware, chips: int | Iterable[int] | None, hosts: int | None) -> tuple[int, ...]:
    """Numbers of chips to search, each once, in order."""
    if (chips is None) == (hosts is None):
        raise ValueError("give chips= (a number, or several to choose from) or hosts=")
    if hosts is not None:
        if machine.host is None:
            raise ValueError(f"hosts={hosts!r}: no host with {machine.chip.name} is known; give chips=")
        chips = whole(hosts, f"hosts={hosts!r}") * machine.host_ranks
    several = list(chips) if isinstance(chips, Iterable) and not isinstance(chips, str) else [chips]
    found = sorted({whole(one, f"chips={one!r}") for one in several})
    if not found or found[-1] > MOST_CHIPS:
        raise ValueError(f"chips={chips!r}: give numbers from 1 to {MOST_CHIPS}")
    return tuple(found)


def allowed_values(only: Mapping[str, Any] | None) -> dict[str, tuple[Any, ...]]:
    """Each field's values as a tuple. Raises ValueError for a field that a search does not choose."""
    if only is not None and not isinstance(only, Mapping):
        raise ValueError(f"only={only!r}: give a mapping of fields of a layout to values")
    found = {}
    for name, value in (only or {}).items():
        one_of(name, CHOSEN, f"only={{{name!r}: …}}")
        several = isinstance(value, Iterable) and not isinstance(value, str)
        found[name] = tuple(value) if several else (value,)
    return found


def setup_settings(machine: Hardware, given: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields of a Setup. Raises ValueError for unknown ones and values."""
    legal: dict[str, tuple[Any, ...]] = dict(
        precision=PRECISIONS,
        states=tuple(STATES),
        attention=ATTENTION,
        dropout=(True, False),
        logits=LOGITS,
        activations=ACTIVATIONS,
        split_experts=(True, False),
    )
    for name, value in given.items():
        one_of(name, tuple(legal), f"{name}={value!r}")
        if name in ("dropout", "split_experts"):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: give True or False")
        else:
            one_of(value, legal[name], f"{name}={value!r}")
    machine.peak(given.get("precision", "bf16"))  # raises for a type without one
    return {**given, "states": STATES[given.get("states", "mixed-16")]}
