"""What a search found, in words: the best as a table, and why the winner wins."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from fmlab.planner.space import CHOSEN
from fmlab.planner.tables import gib, seconds

if TYPE_CHECKING:
    from fmlab.parallel import Layout
    from fmlab.planner.plan import Line, Plan
    from fmlab.planner.search import Search

RUNNERS_UP = 4  # that an explanation names
LINES = 3  # of time, of memory
#: column -> what stands in it
COLUMNS = ("chips", "data", "tensor", "context", "expert", "pipeline")


def text(found: "Search") -> str:
    """The best few, for a terminal."""
    wanted = found.wanted
    lines = [
        f"{found.layouts:,} layouts looked at, best by {wanted.objective}: modelled",
        f"  {found.too_slow:,} cannot be among the best {wanted.keep} (a bound of their time), "
        f"{found.too_large:,} cannot fit (states and activations alone)",
        f"  {found.priced:,} worked out line by line, of which {found.fitting:,} fit {gib(wanted.memory)}",
    ]
    if wanted.usd_per_chip_hour is not None:
        lines.append(f"  {wanted.usd_per_chip_hour:.2f} USD a chip and hour, in hosts of {wanted.host_chips}")
    if found.plans:
        lines += ["", *_table(found)]
    else:
        lines += ["", "none of them will do"]
    lines += [
        f"  {missed(one, wanted.memory, found.plans[0] if found.plans else None)}" for one in found.misses
    ]
    return "\n".join(lines)


def _table(found: "Search") -> Iterator[str]:
    priced = found.wanted.usd_per_chip_hour is not None
    names = ("step", "MFU", "memory", *(("USD/step",) if priced else ()), *COLUMNS, "batches", "others")
    rows = [names]
    for one in found.plans:
        layout = one.setup.layout
        dollars = (f"{found.usd(one):,.2f}",) if priced else ()
        degrees = (str(one.chips), *(str(getattr(layout, name)) for name in COLUMNS[1:]))
        batches = f"{layout.micro_batches} x {one.setup.rows}"
        rows.append(
            (seconds(one.step_seconds), f"{one.mfu:.1%}", gib(one.peak_memory), *dollars, *degrees, batches,
             _others(layout))
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  " + "  ".join((*cells, row[-1])).rstrip()


def _others(layout: "Layout") -> str:
    """Settings that are no degrees and not the default."""
    shown = ("micro_batches", *COLUMNS)
    changed = [
        one.name for one in fields(layout) if one.name in CHOSEN and one.name not in shown
        and getattr(layout, one.name) != one.default
    ]  # fmt: skip
    return ", ".join(f"{name}={getattr(layout, name)}" for name in changed)


def missed(one: "Plan", memory: float, best: "Plan | None" = None) -> str:
    """A plan that does not fit: by how much, what takes most, and what it would bring."""
    largest = max(one.memory.values(), key=lambda line: line.value)
    said = f"does not fit: {gib(one.peak_memory - memory)} too much, most of it {largest.name}"
    if best is not None:
        said += f"; its step would take {1 - one.step_seconds / best.step_seconds:.1%} less than the best"
    return f"{one.setup.layout} {said}"


# region why
def why(found: "Search") -> str:
    """Against each runner-up: what is different, and the lines of time or memory that decide."""
    best = found.best
    said = [f"{best.setup.layout}: {seconds(best.step_seconds)} a step, bound by {best.bound}"]
    for other in found.plans[1 : 1 + RUNNERS_UP]:
        said.append(f"\nagainst {_difference(best, other)}: {_verdict(found, best, other)}")
        if best.step_seconds != other.step_seconds:
            said += [f"  {line}" for line in _changes(best.time, other.time, best.step_seconds)]
        else:
            said += [f"  {line}" for line in _changes(best.memory, other.memory, best.peak_memory)]
    for other in found.misses:
        said.append(f"\n{missed(other, found.wanted.memory, best)}")
    return "\n".join(said)


# endregion


def _difference(best: "Plan", other: "Plan") -> str:
    """The settings in which a layout is not like the best one."""
    mine, its = best.setup.layout, other.setup.layout
    changed = [name for name in CHOSEN if getattr(mine, name) != getattr(its, name)]
    return ", ".join(f"{name}={getattr(its, name)}" for name in changed)


def _verdict(found: "Search", best: "Plan", other: "Plan") -> str:
    if found.wanted.objective == "chips" and best.chips != other.chips:
        return f"{other.chips - best.chips:,} chips more"
    if best.chips != other.chips and found.wanted.objective == "dollars":
        return f"{found.usd(other) / found.usd(best) - 1:.1%} more dollars a step"
    longer = other.step_seconds / best.step_seconds - 1
    if longer:
        return f"a step takes {longer:.1%} longer" if longer > 0 else f"a step takes {-longer:.1%} less"
    return f"as fast, with {gib(other.peak_memory - best.peak_memory)} more memory"


def _changes(mine: Mapping[str, "Line"], its: Mapping[str, "Line"], total: float) -> Iterator[str]:
    """The lines that differ most."""

    def of(lines: Mapping[str, "Line"], name: str) -> float:
        return lines[name].value if name in lines else 0.0

    names = sorted({*mine, *its}, key=lambda name: -abs(of(its, name) - of(mine, name)))
    unit = seconds if next(iter(mine.values())).unit == "s" else gib
    for name in names[:LINES]:
        more = of(its, name) - of(mine, name)
        if abs(more) > 1e-4 * total:
            yield f"{name}: {unit(of(mine, name))} here, {unit(of(its, name))} there"
