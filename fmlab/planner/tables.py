"""A plan in words: one table of memory, one of time."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from fmlab.planner.flops import Flops

if TYPE_CHECKING:
    from fmlab.planner.plan import Line, Plan


def text(plan: "Plan") -> str:
    """The whole plan, for a terminal."""
    return "\n".join([*_head(plan), "", *_memory(plan), "", *_time(plan)])


def _head(plan: "Plan") -> Iterator[str]:
    setup, machine = plan.setup, plan.machine
    shape, flops = setup.shape, plan.flops
    where = f" in {machine.host}" if machine.host and plan.chips > 1 else ""
    yield f"{shape.name} on {plan.chips:,} x {machine.chip.name}{where}: modelled"
    lengths = ", ".join(f"{n} {'tokens' if name == 'tokens' else name}" for name, n in setup.lengths.items())
    yield f"  model            {shape.parameters / 1e9:.3f} billion parameters; rows of {lengths}"
    again = "" if setup.recompute == setup.layout.recompute else f"; recompute {setup.recompute}"
    yield f"  layout           {setup.layout}{again}"
    yield (
        f"  batch            {plan.global_batch:,} rows = {setup.layout.data} x {setup.layout.micro_batches} "
        f"micro-batches of {setup.rows}"
    )
    yield f"  step             {seconds(plan.step_seconds)}, {plan.tokens_per_second:,.0f} tokens/s"
    yield (
        f"  utilisation      MFU {plan.mfu:.1%}, HFU {plan.hfu:.1%} of {plan.peak_flops / 1e12:g} TFLOP/s "
        f"({setup.precision}, dense); {_rate(flops, plan)} ({flops.convention})"
    )
    yield f"  bound by         {plan.bound}"


def _rate(flops: Flops, plan: "Plan") -> str:
    return f"{flops.per_chip_second(plan.step_seconds, plan.chips) / 1e12:.0f} TFLOP/s a chip"


def _memory(plan: "Plan") -> Iterator[str]:
    stage = (
        f"stage {plan.fullest_stage} of {plan.setup.layout.pipeline}, "
        if plan.setup.layout.pipeline > 1
        else ""
    )
    yield f"memory of a rank, {stage}the fullest"
    for line in plan.memory.values():
        yield f"  {line.name:22} {gib(line.value):>12}   {line.formula}"
    yield f"  {'total':22} {gib(plan.peak_memory):>12}   {verdict(plan)}"
    if away := sum(plan.host_memory.values()):
        yield f"  {'in the host memory':22} {gib(away):>12}   {', '.join(plan.host_memory)}: not in the total"
    if plan.fits is False and not _remedies(plan):
        yield "  nothing near it fits on as many chips: give more of them, or look with --search (search(…))"
    yield from (
        f"  {'it would fit with':22} {said}: {seconds(o.step_seconds)} a step" for said, o in _remedies(plan)
    )


def _remedies(plan: "Plan") -> list[tuple[str, "Plan"]]:
    return plan.what_would_fit()[:3]


def _time(plan: "Plan") -> Iterator[str]:
    yield "time of a step, the slowest stage"
    for line in plan.time.values():
        share = line.value / plan.step_seconds
        yield f"  {line.name:22} {seconds(line.value):>12} {share:6.1%}   {line.formula}"
    yield f"  {'total':22} {seconds(plan.step_seconds):>12}"


def verdict(plan: "Plan") -> str:
    """Whether it fits, and by how much it does not."""
    if plan.capacity is None:
        return f"no source gives the memory of {plan.machine.chip.name}"
    if plan.fits:
        return f"fits {gib(plan.capacity)}, {gib(plan.capacity - plan.peak_memory)} are left"
    largest: Line = max(plan.memory.values(), key=lambda line: line.value)
    return f"does NOT fit {gib(plan.capacity)}: {gib(plan.lacking)} too much, most of it {largest.name}"


def gib(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.1f} MiB"


def seconds(value: float) -> str:
    """A time for people."""
    if value >= 0.1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-4 else f"{value * 1e6:.1f} us"


def html(plan: "Plan") -> str:
    """The whole plan, for a notebook."""
    head = "".join(f"<div>{escape(line.strip())}</div>" for line in _head(plan))
    total = plan.step_seconds
    rows = {
        "memory": [(one.name, gib(one.value), "", one.formula) for one in plan.memory.values()]
        + [("total", gib(plan.peak_memory), "", verdict(plan))],
        "time": [
            (one.name, seconds(one.value), f"{one.value / total:.1%}", one.formula)
            for one in plan.time.values()
        ]
        + [("total", seconds(total), "", "")],
    }
    tables = "".join(
        f"<table><caption>{name} (modelled)</caption>{''.join(map(_row, lines))}</table>"
        for name, lines in rows.items()
    )
    return f"<div>{head}{tables}</div>"


def _row(cells: tuple[str, ...]) -> str:
    name, value, share, formula = map(escape, cells)
    right = ' style="text-align:right"'
    return f"<tr><th>{name}</th><td{right}>{value}</td><td{right}>{share}</td><td>{formula}</td></tr>"
