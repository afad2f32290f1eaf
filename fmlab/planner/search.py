"""The best layouts there are: every legal one is looked at, and what cannot win is not worked out.

    found = search("gpt3-175b", chip="a100-80gb", chips=1024, global_batch=1536, seq_len=2048)
    print(found)                  the best few, and how many were looked at
    found.best                    a Plan like any other
    print(found.why())            why it wins: which lines are smaller than the runners-up's
    found.pareto()                plans that no other beats in both memory and time
    found.misses                  would win, and lack the fewest bytes

A branch and bound: layouts come in the order of a bound that no step of theirs can beat
(fmlab.planner.space), and once the bound is above the last of the best, the rest is counted and left out.
What is left is exactly what trying out every layout with `plan` would find.
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fmlab.chips import Chip
from fmlab.parallel.values import above_zero, one_of, whole
from fmlab.planner.calibration import Calibration
from fmlab.planner.flops import check_convention
from fmlab.planner.hardware import Hardware, hardware
from fmlab.planner.modelshape import ModelShape
from fmlab.planner.parts import MOST
from fmlab.planner.plan import Plan
from fmlab.planner.shapes import model_shape
from fmlab.planner.space import Family, Space, Way
from fmlab.planner.wanted import (
    OBJECTIVES,
    Wanted,
    allowed_values,
    counts_of,
    price,
    setup_settings,
    usable_memory,
)

MISSES = 3  # plans that do not fit which a search names

Candidate = tuple[Space, Family, Way]


@dataclass(frozen=True)
class Search:
    """What a search found. Every number is modelled.

    plans: the best that fit, the best first.
    layouts: legal ones, all of which were looked at. Of these
        too_slow: cannot beat the last of `plans`, by a bound of their time
        too_large: cannot fit, by their weights, optimizer states and activations alone
        priced: were worked out; fitting: of these fit.
    """

    wanted: Wanted
    plans: tuple[Plan, ...]
    layouts: int
    too_slow: int
    too_large: int
    priced: int
    fitting: int
    _spaces: tuple[Space, ...] = field(repr=False)
    _heavy: list[tuple[float, int, Candidate]] = field(repr=False)
    _light: list[tuple[float, int, Plan]] = field(repr=False)

    @cached_property
    def misses(self) -> tuple[Plan, ...]:
        """Of the plans that would win if they fitted, those that lack the fewest bytes."""
        best = self.plans[0] if self.plans else None
        least = (float("inf"),) if best is None else self.wanted.score(best.chips, best.step_seconds)
        return _misses(self._heavy, self._light, self.wanted, least)

    @property
    def best(self) -> Plan:
        """The winner. ValueError, with what is nearest, where no layout fits."""
        if not self.plans:
            raise ValueError(f"none of {self.layouts:,} layouts will do{self._nearest()}")
        return self.plans[0]

    def _nearest(self) -> str:
        from fmlab.planner.found import missed

        return "".join(f"; {missed(one, self.wanted.memory)}" for one in self.misses)

    def usd(self, one: Plan) -> float:
        """Dollars of a step of a plan. Raises ValueError where no price is known."""
        return self.wanted.usd(one.chips, one.step_seconds)

    def why(self) -> str:
        """In words: where the winner beats each of the runners-up, and what would win if it fitted."""
        from fmlab.planner.found import why

        return why(self)

    def pareto(self) -> list[Plan]:
        """Plans that fit and that no other beats in both memory and time, the fastest first.

        Of all layouts, not only of those near the winner, so that it takes longer than the search.
        """
        return list(self._front)

    @cached_property
    def _front(self) -> list[Plan]:
        front: list[tuple[float, float, int, Plan]] = []  # by time; their memory falls
        for number, (bound, (space, family)) in enumerate(_in_order(self._spaces, lambda _, s: (s,))):
            for way in space.ways(family):
                fast = max(bound[0], space.least(family, way))
                room = min([self.wanted.memory, *(memory for time, memory, *_ in front if time <= fast)])
                if space.least_memory(family, way) >= room:
                    continue
                one = _plan(space, family, way)
                if (front and one.peak_memory >= room) or one.peak_memory > self.wanted.memory:
                    continue
                mine = (one.step_seconds, one.peak_memory)
                if not any(time <= mine[0] and memory <= mine[1] for time, memory, *_ in front):
                    front = [f for f in front if f[0] < mine[0] or f[1] < mine[1]]
                    insort(front, (*mine, number, one), key=lambda f: f[:2])
        return [one for *_, one in front]

    def __str__(self) -> str:
        from fmlab.planner.found import text

        return text(self)


def search(
    model: str | ModelShape | Any,
    *,
    chip: str | Chip | None = None,
    chips: int | Iterable[int] | None = None,
    hosts: int | None = None,
    global_batch: int,
    seq_len: int | Mapping[str, int] | None = None,
    objective: str = "time",
    memory: float | None = None,
    most_tensor: int | None = None,
    at_most_seconds: float | None = None,
    usd_per_chip_hour: float | None = None,
    only: Mapping[str, Any] | None = None,
    keep: int = 10,
    flops_convention: str = "full-attention",
    calibration: Calibration | None = None,
    host: str | None = None,
    network_bandwidth: float | None = None,
    machine: Hardware | None = None,
    **settings: Any,
) -> Search:
    """The best layouts of a training step.

    Args:
        model, chip, host, machine, calibration, network_bandwidth, flops_convention: as for `plan`; so are
            `settings`: precision, states, attention, dropout, logits, activations, split_experts.
        chips: how many, or several numbers to choose from. hosts: all chips of so many hosts instead.
        objective: "time" of a step; "dollars" of a step (whole hosts are paid for); "chips": as few as will
            do, and of these the fastest.
        memory: bytes of a chip that may be used (default: what it has).
        most_tensor: highest tensor degree (default: chips that their own links join, such as a host's).
        at_most_seconds: of a step. usd_per_chip_hour: your price (default: the first dated one of `host`).
        only: values that fields of the layout may have: {"schedule": ("1f1b", "interleaved"), "zero": 1}.
        keep: how many plans are kept.

    Data, tensor (with and without sequence parallelism), context, expert and pipeline degrees, schedules,
    chunks of a stage, micro-batches, recompute, and what data ranks divide are all tried. Raises ValueError
    for what cannot be.
    """
    shape = model_shape(model)
    if machine is None:
        machine = hardware(chip, host, network_bandwidth, calibration)
    elif any(one is not None for one in (chip, host, network_bandwidth, calibration)):
        raise ValueError("machine= brings its chip, host, network and calibration: leave the others out")
    one_of(objective, OBJECTIVES, f"objective={objective!r}")
    check_convention(flops_convention)
    if whole(global_batch, f"global_batch={global_batch!r}") > MOST:
        raise ValueError(f"global_batch={global_batch}: more than {MOST} rows cannot be meant")
    wanted = Wanted(
        objective,
        usable_memory(machine, memory),
        None if at_most_seconds is None
        else above_zero(at_most_seconds, f"at_most_seconds={at_most_seconds!r}", "give seconds above 0"),
        whole(keep, f"keep={keep!r}"),
        price(machine, objective, usd_per_chip_hour),
        machine.host_ranks,
    )  # fmt: skip
    counts = counts_of(machine, chips, hosts)
    allowed, kept = allowed_values(only), setup_settings(machine, settings)
    if max(counts) > 1:
        machine.need_wires(max(counts))
    island = 1 if machine.wires is None else machine.wires.island
    tensor = island if most_tensor is None else whole(most_tensor, f"most_tensor={most_tensor!r}")
    spaces = tuple(
        Space(shape, machine, kept, number, global_batch, seq_len, flops_convention, tensor, allowed)
        for number in counts
    )
    return _search(spaces, wanted)


def _search(spaces: tuple[Space, ...], wanted: Wanted) -> Search:
    best: list[tuple[tuple[float, ...], float, int, Plan]] = []
    misses: list[tuple[float, int, Plan]] = []
    heavy: list[tuple[float, int, Candidate]] = []
    priced = fitting = 0
    limit: tuple[float, ...] = (float("inf"),)
    at_most = float("inf") if wanted.at_most is None else wanted.at_most
    order = _in_order(spaces, wanted.score)
    layouts = sum(len(space.ways(family)) for _, (space, family) in order)
    if not layouts:
        raise ValueError(
            f"no layout is left: {', '.join(str(space.chips) for space in spaces)} chips, "
            f"{spaces[0].global_batch} rows and only={dict(spaces[0].only)} leave none that "
            f"{spaces[0].shape.name} can have; allow more values, or other chips"
        )
    for bound, (space, family) in order:
        if len(best) == wanted.keep and bound >= limit:
            break
        for way in space.ways(family):
            fast = space.least(family, way)
            if fast > at_most or (len(best) == wanted.keep and wanted.score(family.chips, fast) >= limit):
                continue
            lacking = space.least_memory(family, way) - wanted.memory
            if lacking > 0:
                heavy.append((lacking, len(heavy), (space, family, way)))
                continue
            one, priced = _plan(space, family, way), priced + 1
            if one.peak_memory > wanted.memory:
                insort(misses, (one.peak_memory, priced, one), key=lambda entry: entry[:2])
                continue
            fitting += 1
            if one.step_seconds <= at_most:
                score = wanted.score(one.chips, one.step_seconds)
                _note(best, (score, one.peak_memory, priced, one), wanted.keep)
                limit = best[-1][0]
    found = tuple(one for *_, one in best)
    slow = layouts - priced - len(heavy)
    return Search(wanted, found, layouts, slow, len(heavy), priced, fitting, spaces, heavy, misses)


def _misses(
    heavy: list[tuple[float, int, Candidate]],
    light: list[tuple[float, int, Plan]],
    wanted: Wanted,
    best: tuple[float, ...],
) -> tuple[Plan, ...]:
    """Of the plans that would win if they fitted, those that lack the fewest bytes.

    heavy: by the least that they lack; light: by what they need. Both are in order of it.
    """
    found = [one for one in light if wanted.score(one[-1].chips, one[-1].step_seconds) < best][:MISSES]
    for lacking, number, (space, family, way) in sorted(heavy, key=lambda one: one[:2]):
        if len(found) == MISSES and lacking + wanted.memory > found[-1][0]:
            break
        if wanted.score(space.chips, space.least(family, way)) >= best:
            continue
        one = _plan(space, family, way)
        if wanted.score(one.chips, one.step_seconds) < best:
            _note(found, (one.peak_memory, -number, one), MISSES)
    return tuple(one for *_, one in found)


def _note(kept: list[Any], one: Any, most: int) -> None:
    """Insert in order; drop what is beyond the best `most`."""
    insort(kept, one, key=lambda entry: entry[:-1])
    del kept[most:]


def _in_order(spaces: Iterable[Space], score: Any) -> list[tuple[tuple[float, ...], tuple[Space, Family]]]:
    """All families, those that may be best first, with the score that none of their layouts beats."""
    found = [
        (score(space.chips, space.least(family)), (space, family))
        for space in spaces
        for family in space.families()
    ]
    return sorted(found, key=lambda one: one[0])


def _plan(space: Space, family: Family, way: Way) -> Plan:
    return Plan(
        space.setup(family, way), space.machine, space.global_batch, space.seq_len, space.flops_convention
    )
