"""Timelines as a trace file for ui.perfetto.dev or chrome://tracing (Chrome's trace event format).

Ranks are processes, their streams are threads; a counter shows the memory. Two sources:

    save(step_events(report), "step.json")     a dry run (fmlab.sim.dry)
    save(device_events(trace), "device.json")  what a simulated device did (fmlab.sim.trace.record)

A name that ends in .gz is compressed; Perfetto opens that too. All times are modelled.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fmlab.sim.event import Event
from fmlab.sim.step import Part

if TYPE_CHECKING:
    from fmlab.sim.report import DryRun

LANES = ("compute", "tensor", "send forward", "send backward", "gather", "reduce")
MOST = 500_000  # events: about 100 MB of JSON, what a browser still opens
Detail = Literal["passes", "operations"]
TraceEvent = dict[str, Any]


def save(events: Iterable[TraceEvent], path: str | Path) -> Path:
    """Write a trace file and return its path. OSError where it cannot be written."""
    path = Path(path)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)
    return path


def device_events(trace: Sequence[Event]) -> list[TraceEvent]:
    """A trace of one or several simulated devices: a process for each device, a thread for each stream."""
    events: list[TraceEvent] = []
    for device in sorted({event.device for event in trace}):
        events.append(_name("process_name", f"device {device}", device))
        for stream in sorted({event.stream for event in trace if event.device == device}):
            events.append(_name("thread_name", f"stream {stream}", device, stream))
    for event in trace:
        events.append(
            _span(
                event.name, event.kind, event.start, event.seconds, event.device, event.stream, _about(event)
            )
        )
        events.append(_memory(event.end, event.device, event.live_bytes_after))
    return events


def step_events(
    run: "DryRun",
    ranks: Sequence[int] | Literal["stages", "all"] = "stages",
    detail: Detail = "passes",
    window: tuple[float, float] | None = None,
) -> list[TraceEvent]:
    """A dry run's step.

    ranks: "stages": one rank of each; "all"; or these. A rank that was not replayed shows what the one that
        stands for it did.
    detail: "passes": a span for each pass and message; "operations": under it each operator, and each message
        of the tensor group.
    window: only what begins between these seconds of the step.

    Raises ValueError for an unknown rank or detail, and for more than half a million spans.
    """
    if detail not in ("passes", "operations"):
        raise ValueError(f"detail={detail!r} is unknown; legal: passes, operations")
    wanted = _ranks(run, ranks)
    low, high = window if window is not None else (0.0, float("inf"))
    events: list[TraceEvent] = []
    for rank in wanted:
        stage, replica, shard = run.program.split.coordinates(rank)
        title = f"rank {rank}: stage {stage}, replica {replica}, shard {shard}"
        events += [
            _name("process_name", title, rank),
            {**_name("process_sort_index", "", rank), "args": {"sort_index": rank}},
        ]
        events += [_name("thread_name", lane, rank, i) for i, lane in enumerate(LANES)]
        stand_in = rank if rank in run.step.ranks else run.program.split.rank(stage)
        for event in _rank_events(run, stand_in, detail, low, high):
            events.append({**event, "pid": rank})
            if len(events) > MOST:
                raise ValueError(
                    f"more than {MOST:,} spans; show fewer ranks (ranks=), a part of the step (window=), or "
                    "detail='passes'"
                )
        events += [_memory(at, rank, size) for at, size in run.memory_over_time(stage) if low <= at <= high]
    return events


def _ranks(run: "DryRun", ranks: Sequence[int] | str) -> list[int]:
    split = run.program.split
    if ranks == "stages":
        return [split.rank(stage) for stage in range(split.pipeline)]
    if ranks == "all":
        return list(range(split.world_size))
    wrong = [rank for rank in ranks if rank not in range(split.world_size)]
    if isinstance(ranks, str) or wrong:
        raise ValueError(f"ranks={ranks!r}: give 'stages', 'all', or ranks of 0..{split.world_size - 1}")
    return [int(rank) for rank in ranks]


def _rank_events(run: "DryRun", rank: int, detail: Detail, low: float, high: float) -> Iterator[TraceEvent]:
    result = run.replay
    for number, lane in enumerate(LANES):
        for i in result.on((rank, lane)):
            task, start = result.tasks[i], result.starts[i]
            if not low <= start <= high or not task.seconds:
                continue
            part = run.step.parts.get(i)
            if part is None:
                yield _span(task.name, task.kind, start, task.seconds, rank, number, {})
                continue
            about = {"blocks": f"{part.blocks[0]}..{part.blocks[-1]}", "messages [ms]": part.talking * 1e3}
            yield _span(task.name, task.kind, start, task.seconds, rank, number, about)
            if detail == "operations":
                yield from _operations(run, part, start, rank)


def _operations(run: "DryRun", part: Part, start: float, rank: int) -> Iterator[TraceEvent]:
    """What runs inside a pass, one after the other; messages of the tensor group on a thread of their own."""
    whole = sum(one.seconds for one in part.passes)
    slower = part.computing / whole if whole else 1.0
    for one, block in zip(part.passes, part.blocks, strict=True):
        for event in one.events:
            about = _about(event) | {"block": block}
            if event.kind != "collective":
                seconds = event.seconds * slower
                yield _span(event.name, event.kind, start, seconds, rank, 0, about)
            else:
                seconds = run.message_seconds(part.stage, event) if part.talking else 0.0
                yield _span(event.name, "tensor", start, seconds, rank, 1, about)
            start += seconds


def _about(event: Event) -> TraceEvent:
    about: TraceEvent = {"module": event.module, "shape": list(event.shape), "dtype": event.dtype}
    about |= {
        "FLOPs": event.flops,
        "bytes": event.bytes,
        "payload": event.payload_bytes,
        "limit": event.bound,
    }
    return {name: value for name, value in about.items() if value}


def _span(
    name: str, category: str, start: float, seconds: float, pid: int, tid: int, about: TraceEvent
) -> TraceEvent:
    microseconds = {"ts": round(start * 1e6, 4), "dur": round(seconds * 1e6, 4)}
    return {"ph": "X", "name": name, "cat": category, **microseconds, "pid": pid, "tid": tid, "args": about}


def _memory(at: float, pid: int, size: int) -> TraceEvent:
    return {
        "ph": "C",
        "name": "memory [GiB]",
        "ts": round(at * 1e6, 4),
        "pid": pid,
        "args": {"live": size / 2**30},
    }


def _name(what: str, name: str, pid: int, tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
