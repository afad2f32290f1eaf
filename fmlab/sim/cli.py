"""`fmlab dry-run`: a training step of any size, on shapes alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fmlab.sim.dry import dry_run
from fmlab.sim.split import AXES, Split
from fmlab.sim.tables import operations_table
from fmlab.storage import check_writable


@dataclass
class DryRunCommand:
    """Model a training step on any number of chips: time, utilisation, bubble, memory of each stage.

    Nothing is allocated and nothing is computed, so any model fits this machine. Ends with 0 when the step
    fits the chips' memory, else with 1. One of --host and --chip is needed.

    For example: fmlab dry-run gpt2 --chip trn2 --global-batch 8 --seq-len 1024
    """

    model: tyro.conf.Positional[str] = "gpt3-175b"
    """A preset: gpt3-175b, llama2-70b, t5-base, …"""
    host: str | None = None
    """Which chip, and how they are wired: p4de.24xlarge, trn2.48xlarge, … (`fmlab chips list` names all)."""
    chip: str | None = None
    """Instead of host: one chip alone (h100, trn2, …)."""
    chips: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many there are; to check that the degrees multiply to it."""
    global_batch: Annotated[int, tyro.conf.arg(metavar="N")] = 1536
    """Rows of a step, over all replicas and micro-batches."""
    seq_len: Annotated[int, tyro.conf.arg(metavar="N")] = 2048
    """Tokens of a row."""
    data: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Replicas of the model."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the replicas divide: 1 optimizer states, 2 gradients too, 3 weights too."""
    tensor: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Ranks that share each matrix."""
    pipeline: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Stages."""
    virtual_stages: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Chunks of the model on each stage."""
    micro_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Parts that a replica's rows are run in."""
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are made again in the backward pass: attention's scores, or whole layers."""
    sequence_parallel: bool = False
    """Divide the positions between tensor-parallel regions."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    gradients: Literal["same", "fp32"] = "same"
    """Element type of gradient sums: as the weights, or fp32."""
    bucket_mb: float = 25.0
    """Gradients are sent in buckets of at least so many MiB."""
    axis_order: tuple[str, ...] = AXES
    """Along which axis ranks are numbered first (neighbours, which share a host), to the last."""
    attention: Literal["fused", "unfused"] = "fused"
    execution: Literal["eager", "compiled"] | None = None
    """A kernel for each operator, or one for a chain of pointwise ones; default: as the chip's software."""
    rates: Literal["peak", "achievable"] = "peak"
    """Published peaks, or the rates that named sources measured."""
    link_latency: float | None = None
    """Seconds of a link inside a host, where no source gives it."""
    network_latency: float | None = None
    """Seconds from host to host, where no source gives it."""
    network_bandwidth: float | None = None
    """Bytes a second of a host, one way, instead of the published figure."""
    operations: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Also list the N operators and messages that take most time."""
    trace: Path | None = None
    """Also write the timeline to this file, for ui.perfetto.dev (.json or .json.gz)."""
    detail: Literal["passes", "operations"] = "passes"
    """What the timeline shows: passes and messages, or each operator."""


def main(argv: list[str]) -> int:
    """Run `fmlab dry-run` with these arguments; returns the exit status.

    Raises ValueError or OSError for what the user can put right.
    """
    command = tyro.cli(DryRunCommand, args=argv, prog="fmlab dry-run")
    if command.trace is not None:
        check_writable(command.trace.parent)
    run = dry_run(
        command.model,
        Split(**{name: getattr(command, name) for name in Split.__dataclass_fields__}),
        host=command.host,
        chip=command.chip,
        chips=command.chips,
        global_batch=command.global_batch,
        seq_len=command.seq_len,
        attention=command.attention,
        execution=command.execution,
        rates=command.rates,
        link_latency=command.link_latency,
        network_latency=command.network_latency,
        network_bandwidth=command.network_bandwidth,
    )
    print(run)
    if command.operations:
        print(f"\n{operations_table(run, command.operations)}")
    if command.trace is not None:
        path = run.save_trace(command.trace, detail=command.detail)
        print(f"\nwrote {path}; open it at ui.perfetto.dev")
    print(f"\nthe dry run itself took {run.wall_seconds:.1f} s (measured)")
    return 1 if run.fits is False else 0
