"""Dry-run a training step of any size: no weights, no chips, only shapes.

    from fmlab.sim import dry_run
    report = dry_run("gpt3-175b", host="p4de.24xlarge", tensor=8, pipeline=16, data=8, micro_batches=24,
                     global_batch=1536, seq_len=2048)
    print(report)                      # step time, utilisation, bubble, memory of each stage
    report.save_trace("step.json")     # for ui.perfetto.dev

Each kind of block is traced once on the meta device, then all ranks, the schedule and the collectives are
replayed (fmlab.sim.roles, .step, .replay). Everything that comes out is modelled.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fmlab.chips import Chip, Topology
from fmlab.chips import chip as find_chip
from fmlab.chips import host as find_host
from fmlab.sim.fabric import Fabric, host_fabric, need_host
from fmlab.sim.ledger import ledger
from fmlab.sim.recorder import Recorder
from fmlab.sim.replay import replay
from fmlab.sim.report import DryRun
from fmlab.sim.roles import trace
from fmlab.sim.schedule import schedule
from fmlab.sim.simulated import Execution
from fmlab.sim.split import Split
from fmlab.sim.step_end import step_tasks
from fmlab.sim.usage import usage

RATES = ("peak", "achievable")
MOST_TASKS = 400_000


def dry_run(
    model: str,
    split: Split | None = None,
    *,
    host: str | None = None,
    chip: str | Chip | None = None,
    chips: int | None = None,
    topology: Topology | None = None,
    global_batch: int,
    seq_len: int,
    attention: str = "fused",
    execution: Execution | None = None,
    rates: str = "peak",
    assumed_flops: Mapping[str, float] | None = None,
    link_latency: float | None = None,
    network_latency: float | None = None,
    network_bandwidth: float | None = None,
    expand: bool = False,
    slow: Mapping[int, float] | None = None,
    config: Mapping[str, Any] | None = None,
    **degrees: Any,
) -> DryRun:
    """Model one training step; nothing is allocated and nothing is computed.

    Args:
        model: a preset of fmlab.models ("gpt3-175b", "llama2-70b", …).
        split, or its fields as keywords (data, zero, tensor, pipeline, …): how the step is divided.
        host: a host of fmlab.chips ("p4de.24xlarge"); it says which chip, and how chips are wired.
        chip: instead of host: a chip's name, or a Chip (`Chip.measured` for a machine of your own). Several
            chips then need `topology`.
        chips: their number, to check the degrees against; default: what the split takes.
        global_batch: rows of a step over all replicas and micro-batches. seq_len: tokens of a row.
        attention: "fused" or "unfused" (fmlab.sim.cores).
        execution: "eager": a kernel for each operator; "compiled": one for a chain of pointwise operators
            (fmlab.sim.fuse); default: as the chip's software works.
        rates: "peak": published peaks, links at their full rate. "achievable": matrix rates that a named
            source measured, and measured collectives inside hosts where there are any.
        assumed_flops: dtype -> FLOP/s of matrix products where no source gives a rate; your assumption.
        link_latency, network_latency [s], network_bandwidth [B/s, one way, per host]: instead of the
            published ones (see fmlab.sim.fabric.host_fabric).
        expand: replay every rank instead of one for each stage. slow: rank -> how many times slower it
            computes; it expands.
        config: fields of the model's config to replace, such as dict(dropout=0.1).

    Raises ValueError for anything that cannot be, with what can.
    """
    started = time.perf_counter()
    split = _split(split, degrees)
    if rates not in RATES:
        raise ValueError(f"rates={rates!r} is unknown; legal: {', '.join(RATES)}")
    for name, value in (("seq_len", seq_len), ("global_batch", global_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
    split.check_world(split.world_size if chips is None else chips)
    rows = split.rows(global_batch)
    device, fabric = _machine(
        split, host, chip, topology, rates, link_latency, network_latency, network_bandwidth
    )
    if rates == "achievable" and device.achievable_flops(split.precision) is None:
        raise ValueError(
            f"nobody's measured {split.precision} rate of {device.name} is known; use rates='peak'"
        )
    slow = dict(slow or {})
    if wrong := [rank for rank in slow if not 0 <= rank < split.world_size] + [
        r for r, by in slow.items() if by <= 0
    ]:
        raise ValueError(
            f"slow={slow}: {wrong} is no rank of 0..{split.world_size - 1} with a factor above 0"
        )
    recorder = Recorder(device, execution, rates == "achievable", assumed_flops)
    program = trace(model, split, rows, seq_len, recorder, attention, **(config or {}))
    actions = schedule(split.schedule, split.pipeline, split.micro_batches, split.virtual_stages)
    expand = expand or bool(slow)
    _check_size(split, program.layers, expand)
    with _no_collecting():
        step = step_tasks(program, actions, device, fabric, expand, slow)
        result = replay(step.tasks)
    return DryRun(
        program=program,
        chip=device,
        where=host or device.name,
        rates=rates,
        execution=recorder.simulated.settings.execution,
        global_batch=global_batch,
        actions=actions,
        fabric=fabric,
        step=step,
        replay=result,
        usages=tuple(usage(step, result, rank) for rank in step.ranks),
        ledgers=tuple(
            ledger(program, stage, actions[stage], _capacity(device)) for stage in range(split.pipeline)
        ),
        notes=fabric.notes if fabric else (),
        wall_seconds=time.perf_counter() - started,
    )


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Python's search for circular garbage takes most of the time where many small objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _split(split: Split | None, degrees: Mapping[str, Any]) -> Split:
    if split is not None:
        if degrees:
            raise ValueError(f"give split= or its fields, not both: {', '.join(degrees)}")
        return split
    legal = Split.__dataclass_fields__
    if unknown := sorted(set(degrees) - set(legal)):
        raise ValueError(f"dry_run has no {', '.join(unknown)}; a split has {', '.join(legal)}")
    return Split(**degrees)


def _machine(
    split: Split,
    host: str | None,
    chip: str | Chip | None,
    topology: Topology | None,
    rates: str,
    link_latency: float | None,
    network_latency: float | None,
    network_bandwidth: float | None,
) -> tuple[Chip, Fabric | None]:
    """The chip, and what joins the chips (None for a single one)."""
    if (host is None) == (chip is None):
        raise ValueError(
            "give a host (its chips and their wires: p4de.24xlarge) or a chip alone (h100), one of the two"
        )
    settings = dict(
        link_latency=link_latency, network_latency=network_latency, network_bandwidth=network_bandwidth
    )
    if host is not None:
        if topology is not None:
            raise ValueError("host= brings its own wires; with topology= give chip=")
        one = find_host(host)
        measured = rates == "achievable"
        return one.chip, host_fabric(host, split.world_size, measured, **settings)
    if given := [name for name, value in settings.items() if value is not None]:
        raise ValueError(f"{', '.join(given)} describe the network of host=; with chip= give topology=")
    assert chip is not None
    device = chip if isinstance(chip, Chip) else find_chip(chip)
    if topology is None:
        if split.world_size > 1:
            raise need_host(device.name, split.world_size)
        return device, None
    if len(topology.chips) < split.world_size:
        raise ValueError(f"the split takes {split.world_size} chips, the topology has {len(topology.chips)}")
    return device, Fabric(topology)


def _capacity(chip: Chip) -> int | None:
    try:
        return chip.memory_bytes
    except ValueError:  # no source gives it
        return None


def _check_size(split: Split, layers: int, expand: bool) -> None:
    """Refuse replays that would take minutes."""
    ranks = split.world_size if expand else split.pipeline
    cut = layers // split.pipeline if split.zero >= 2 else split.virtual_stages
    tasks = 4 * ranks * split.micro_batches * max(cut, 1)
    if tasks > MOST_TASKS:
        fix = (
            "leave expand and slow out, or take fewer ranks"
            if expand
            else "take fewer micro_batches or stages"
        )
        raise ValueError(f"about {tasks:,} tasks to replay; {fix} (at most about {MOST_TASKS:,})")
