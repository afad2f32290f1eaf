"""A dry run in words and tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from fmlab.sim.schedule import bubble_formula
from fmlab.sim.units import binary, decimal, duration

if TYPE_CHECKING:
    from fmlab.sim.report import DryRun

T = TypeVar("T")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def summary(run: "DryRun") -> str:
    """The most important numbers, where the time goes, and the memory of the fullest stages."""
    split, program = run.program.split, run.program
    fits = {True: "fits", False: "does NOT fit", None: "memory of the chip unknown"}[run.fits]
    ideal = bubble_formula(split.pipeline, split.micro_batches, split.virtual_stages)
    head = [
        f"{program.name} ({program.parameters / 1e9:.1f} billion parameters) on {split.world_size} x "
        f"{run.chip.title} ({run.where}): modelled, at {run.rates} rates",
        f"  data {split.data} x tensor {split.tensor} x pipeline {split.pipeline}"
        + (f" x {split.virtual_stages} chunks" if split.virtual_stages > 1 else "")
        + f", zero {split.zero}, {split.micro_batches} micro-batches of {program.rows} x {program.seq_len} "
        f"tokens, {split.schedule}, recompute {split.recompute}, {split.precision}, "
        f"{program.attention} attention, {run.execution}",
        f"  step {duration(run.seconds)}, {run.tokens_per_second:,.0f} tokens/s",
        f"  {decimal(run.model_flops() / run.seconds / split.world_size, 'FLOP/s')} a chip: model FLOPs "
        f"(full attention, recompute not counted) at {run.utilisation():.1%} of the peak; executed FLOPs "
        f"{run.hardware_utilisation:.1%}",
        f"  bubble {run.bubble:.1%} (formula with equal stages and free messages: {ideal:.1%}), exposed "
        f"communication {run.exposed_communication:.1%}",
        f"  memory: {binary(run.peak_memory)} on the fullest chip, {fits}",
    ]
    head += [f"  assumed: {note}" for note in run.notes]
    return "\n".join([*head, "", usage_table(run), "", memory_table(run)])


def usage_table(run: "DryRun", most: int = 8) -> str:
    """Where the time of the replayed ranks goes, in percent of the step."""
    parts = ("computing", "recomputing", "optimizer", "tensor", "pipeline", "data", "bubble")
    rows = [["% of the step", *parts]]
    for one in _some(run.usages, most):
        rows.append([f"rank {one.rank}", *(f"{100 * one.share(part):.1f}" for part in parts)])
    return aligned(rows)


def memory_table(run: "DryRun", most: int = 8) -> str:
    """The ledger of the stages."""
    lines = [line for line in run.ledgers[0].lines if any(one.lines[line] for one in run.ledgers)]
    rows = [["GiB on a rank of", *lines, "all"]]
    for one in _some(run.ledgers, most):
        sizes = [*(one.lines[line] for line in lines), one.total]
        rows.append([f"stage {one.stage}", *(f"{size / 2**30:.2f}" for size in sizes)])
    text = aligned(rows)
    if run.fits is False:
        worst = max(run.ledgers, key=lambda one: one.total)
        text += f"\n{worst}"
    return text


def operations_table(run: "DryRun", count: int = 10) -> str:
    """The operators and messages that take most of the busiest rank's step."""
    rows = [["operation", "% of step", "time", "calls", "FLOPs", "bytes"]]
    for one in run.top_operations(count):
        rows.append(
            [
                one.name,
                f"{100 * one.seconds / run.seconds:.1f}",
                duration(one.seconds),
                f"{one.calls:,}",
                decimal(one.flops, "FLOP") if one.flops else "",
                binary(one.bytes) if one.bytes else "",
            ]
        )
    return aligned(rows)


def _some(items: Sequence[T], most: int) -> list[T]:
    """All of a short sequence; of a long one the first, some between, and the last."""
    if len(items) <= most:
        return list(items)
    at = sorted({round(i * (len(items) - 1) / (most - 1)) for i in range(most)})
    return [items[i] for i in at]
