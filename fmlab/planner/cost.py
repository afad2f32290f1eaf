"""What a whole run takes and costs: tokens -> steps -> days, chip hours, dollars, energy.

    run_cost(step_seconds=13.75, tokens_per_step=64 * 2048, tokens=300e9, chips=64, host="p4de.24xlarge")
    run_cost(..., usd_per_chip_hour=1.10)      your own price; price="capacity block" is a kind of the host's
    run_cost(..., goodput=0.93)                with failures and checkpoints, see fmlab.planner.goodput
    training_days(flops=3e23, chips=1024, flops_per_chip=140e12)    from FLOPs and a rate alone

Prices are dated and of one region (fmlab.chips.host). They buy hosts: a run pays for whole ones. Energy needs
the power of a chip: no catalogue is asked to guess it.
"""

import math
from dataclasses import dataclass

from fmlab.chips import Chip, Host, Price
from fmlab.chips import host as find_host
from fmlab.parallel.values import above_zero, whole

SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Cost:
    """A run, priced.

    steps, tokens: of the run. seconds: from start to end, with what failures and checkpoints take.
    goodput: the share of them in which new training is done.
    chips: that train; chips_paid: with those of the last host that are not used.
    usd: None without a price. usd_per_chip_hour, price: what it was computed with; price None: your own.
    kwh: energy of the chips and of what is around them; None without a power.
    """

    steps: int
    tokens: float
    seconds: float
    goodput: float
    chips: int
    chips_paid: int
    usd: float | None = None
    usd_per_chip_hour: float | None = None
    price: Price | None = None
    kwh: float | None = None

    @property
    def days(self) -> float:
        return self.seconds / SECONDS_A_DAY

    @property
    def chip_hours(self) -> float:
        """Hours of chips, those that are paid for."""
        return self.chips_paid * self.seconds / 3600

    @property
    def usd_per_million_tokens(self) -> float:
        """Raises ValueError without a price."""
        if self.usd is None:
            raise ValueError("no price was given: pass host= or usd_per_chip_hour=")
        return self.usd / self.tokens * 1e6

    def __str__(self) -> str:
        parts = [
            f"{self.steps:,} steps, {self.tokens / 1e9:,.1f} billion tokens",
            f"{self.days:,.1f} days on {self.chips:,} chips ({self.chip_hours:,.0f} chip hours, "
            f"goodput {self.goodput:.0%})",
        ]
        if self.usd is not None:
            parts.append(
                f"{self.usd:,.0f} USD at {self.usd_per_chip_hour:.2f} a chip and hour ({self._priced()})"
            )
        if self.kwh is not None:
            parts.append(f"{self.kwh / 1e3:,.1f} MWh")
        return "\n".join(parts)

    def _priced(self) -> str:
        one = self.price
        return "your price" if one is None else f"{one.kind}, {one.region}, {one.date}"


def run_cost(
    step_seconds: float,
    tokens_per_step: int,
    tokens: float,
    chips: int,
    host: str | None = None,
    price: str | None = None,
    usd_per_chip_hour: float | None = None,
    goodput: float = 1.0,
    watts_per_chip: float | None = None,
    overhead: float = 1.0,
) -> Cost:
    """A run from the time of its step.

    step_seconds: of one step, as `plan` predicts or you measured. tokens: of the whole run; the last step is
    run whole. host: of fmlab.chips, whose price is taken; price: which kind of it ("on-demand", "capacity
    block", …), by default the first. usd_per_chip_hour: your own price instead.
    goodput: share of the time that is training. watts_per_chip: what a chip draws under this load (its rated
    power is an upper bound; see `rated_watts`). overhead: power of everything, hosts and cooling included,
    for each watt of the chips. Raises ValueError for what cannot be: numbers not above 0, both a price and a
    host's, no known price.
    """
    seconds = above_zero(step_seconds, f"step_seconds={step_seconds!r}", "give seconds above 0")
    per_step = whole(tokens_per_step, f"tokens_per_step={tokens_per_step!r}")
    wanted = above_zero(tokens, f"tokens={tokens!r}", "give a number above 0")
    number = whole(chips, f"chips={chips!r}")
    if not 0 < above_zero(goodput, f"goodput={goodput!r}", "give a share above 0 and up to 1") <= 1:
        raise ValueError(f"goodput={goodput!r}: give a share above 0 and up to 1")
    if above_zero(overhead, f"overhead={overhead!r}", "give 1 or more") < 1:
        raise ValueError(f"overhead={overhead!r}: give 1 or more: it counts the chips themselves")
    steps = math.ceil(wanted / per_step)
    total = steps * seconds / goodput
    one = None if host is None else find_host(host)
    paid = number if one is None else math.ceil(number / one.chips) * one.chips
    rate, named = _rate(one, price, usd_per_chip_hour)
    hours = paid * total / 3600
    kwh = None
    if watts_per_chip is not None:
        watts = above_zero(watts_per_chip, f"watts_per_chip={watts_per_chip!r}", "give watts above 0")
        kwh = number * watts * overhead * total / 3.6e6
    usd = None if rate is None else rate * hours
    return Cost(steps, steps * per_step, total, goodput, number, paid, usd, rate, named, kwh)


def _rate(one: Host | None, kind: str | None, own: float | None) -> tuple[float | None, Price | None]:
    """Dollars of a chip and hour, and the dated price that they are from."""
    if own is not None:
        if kind is not None:
            raise ValueError(f"price={kind!r} with usd_per_chip_hour={own!r}: give one of them")
        return above_zero(own, f"usd_per_chip_hour={own!r}", "give dollars above 0"), None
    if one is None:
        if kind is not None:
            raise ValueError(f"price={kind!r} is a kind of a host's prices: give host= too")
        return None, None
    rate = one.usd_per_chip_hour(kind)
    return rate, next(price for price in one.prices if kind in (None, price.kind))


def rated_watts(chip: Chip) -> float:
    """What a chip draws at most, by its maker. ValueError where no source gives it."""
    return chip.figure("power").base


def training_days(flops: float, chips: int, flops_per_chip: float) -> float:
    """Days of a run from its FLOPs and the rate of a chip [FLOP/s], both counted in the same way."""
    work = above_zero(flops, f"flops={flops!r}", "give FLOPs above 0")
    rate = above_zero(flops_per_chip, f"flops_per_chip={flops_per_chip!r}", "give FLOPs a second above 0")
    return work / (whole(chips, f"chips={chips!r}") * rate) / SECONDS_A_DAY
