"""Timelines and memory of dry runs and simulated devices, as figures that stand without a browser.

    timeline(run)              who computes, talks and waits when, one row for each stage
    schedule_view(replay)      a pipeline schedule with its bubble
    trace_view(trace)          a pipeline's step as it ran on real ranks
    device_timeline(trace)     the streams of a simulated device
    memory_view(run)           memory over time
    operations(run)            a table of what takes most of the step

The interactive twin of a dry run's timeline is the file that `run.save_trace("step.json")` writes, for
ui.perfetto.dev.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmlab.lab.figures import PALETTE, Captioned, caption, figure

if TYPE_CHECKING:
    from fmlab.parallel.pipeline.trace import PipelineTrace
    from fmlab.sim.event import Event
    from fmlab.sim.replay import Replay
    from fmlab.sim.report import DryRun

#: What a bar is -> its colour and its pattern, so that print and every eye can tell them apart.
STYLES = {
    "forward": (PALETTE[0], ""),
    "backward": (PALETTE[5], ""),
    "backward, inputs": (PALETTE[5], ""),
    "backward, weights": (PALETTE[2], ""),
    "messages": (PALETTE[2], "////"),
    "optimizer": (PALETTE[3], "...."),
    "compute": (PALETTE[0], ""),
    "copy": (PALETTE[3], "...."),
    "collective": (PALETTE[2], "////"),
}
_KINDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, inputs",
    "weight": "backward, weights",
    "optimizer": "optimizer",
}
MOST_LABELS = 160
Bar = tuple[str, float, float, str]  # kind, start, length, name
Row = tuple[str, Sequence[Bar], Sequence[Bar]]  # name, bars, thin bars below


def timeline(
    run: "DryRun", ranks: Sequence[int] | None = None, window: tuple[float, float] | None = None
) -> Captioned:
    """The step of a dry run: a row for each rank (default: one of each stage), messages on a thin row below.

    window: seconds of the step to show.
    """
    split = run.program.split
    shown = [split.rank(stage) for stage in range(split.pipeline)] if ranks is None else list(ranks)
    wrong = [rank for rank in shown if rank not in run.step.ranks]
    if wrong:
        raise ValueError(
            f"ranks {wrong} were not replayed; choose from {list(run.step.ranks)[:16]} or expand=True"
        )
    low, high = window or (0.0, run.seconds)
    rows: list[Row] = []
    for rank in shown:
        computing = _bars(run.replay, rank, ("compute",), low, high)
        talking = _bars(run.replay, rank, ("send forward", "send backward", "gather", "reduce"), low, high)
        rows.append((f"stage {split.coordinates(rank)[0]}, rank {rank}", computing, talking))
    text = (
        f"{run.program.name}, {split.schedule}: bubble {100 * run.bubble:.1f} %, exposed communication "
        f"{100 * run.exposed_communication:.1f} % of a step of {run.seconds:.3g} s. Time in a tensor group's "
        "messages is inside the passes."
    )
    return _gantt(rows, low, high, text, numbers={"bubble [%]": 100 * run.bubble, "step [s]": run.seconds})


def schedule_view(result: "Replay", text: str = "", unit: str = "forward passes") -> Captioned:
    """A replayed pipeline schedule (fmlab.sim.schedule.replay_schedule), a row for each stage."""
    chunks = 1 + max(_chunk(task.name) for task in result.tasks)
    rows = schedule_rows(result)
    stages = range(len(rows))
    busy = sum(result.busy((stage, "compute")) for stage in stages) / len(stages)
    bubble = 100 * (1 - busy / result.seconds)
    if not text:
        pale = " Every second chunk of a stage is pale." if chunks > 1 else ""
        text = f"White is the bubble: {bubble:.1f} % of the time.{_says_numbers(rows)}{pale}"
    return _gantt(rows, 0.0, result.seconds, text, {"bubble [%]": bubble}, unit, scale=1.0)


def schedule_rows(result: "Replay") -> list[Row]:
    """The passes of each stage of a replayed schedule."""
    stages = sorted({lane[0] for lane in result.lanes if lane[1] == "compute"})  # type: ignore[index]
    return [(f"stage {s}", _bars(result, s, ("compute",), 0.0, result.seconds), []) for s in stages]


def trace_view(trace: "PipelineTrace", text: str = "") -> Captioned:
    """A step of a pipeline as it ran on its ranks (Pipeline.trace()), a row for each stage."""
    rows = trace_rows(trace)
    high = max(start + length for _, bars, _ in rows for _, start, length, _ in bars)
    if not text:
        text = f"A step as it ran: white is time without a pass.{_says_numbers(rows)}"
    fig = gantt(rows, 0.0, high, "ms", 1e3)
    return caption(fig, kind="measured", text=text, noisy=True)


def trace_rows(trace: "PipelineTrace") -> list[Row]:
    """The passes of each stage of a recorded step, from the first one on."""
    first = min(one.start for stage in trace.stages for one in stage.passes)
    return [
        (
            f"stage {stage.stage}",
            [
                (_KINDS[p.action.direction], p.start - first, p.end - p.start, str(p.action))
                for p in stage.passes
            ],
            [],
        )
        for stage in trace.stages
    ]


def device_timeline(trace: Sequence["Event"], window: tuple[float, float] | None = None) -> Captioned:
    """What a simulated device did (fmlab.sim.trace.record): a row for each of its streams."""
    if not trace:
        raise ValueError("the trace is empty; run something on the simulated device inside record()")
    low, high = window or (min(e.start for e in trace), max(e.end for e in trace))
    streams = sorted({(event.device, event.stream) for event in trace})
    rows: list[Row] = []
    for device, stream in streams:
        events = [e for e in trace if (e.device, e.stream) == (device, stream) and low <= e.start <= high]
        bars = [(_phase(e), e.start, e.seconds, "") for e in events]
        rows.append((f"device {device}, stream {stream}", bars, []))
    busy = sum(event.seconds for event in trace if event.kind == "compute")
    text = f"{len(trace)} operations and messages in {high - low:.3g} s, {busy:.3g} s of them computing."
    return _gantt(rows, low, high, text, {"operations": len(trace), "time [s]": high - low}, y_label="stream")


def _phase(event: "Event") -> str:
    return event.phase if event.kind == "compute" and event.phase in STYLES else event.kind


def memory_view(run: "DryRun", stages: Sequence[int] | None = None) -> Captioned:
    """Memory over time of some stages (default: first, middle, last), with the chip's capacity."""
    last = run.program.split.pipeline - 1
    shown = sorted({0, last // 2, last}) if stages is None else list(stages)
    fig, ax = figure(x="time [s]", y="memory [GiB]", title="Memory of one rank of a stage")
    for stage in shown:
        points = run.memory_over_time(stage)
        ax.plot(
            [at for at, _ in points], [size / 2**30 for _, size in points], label=f"stage {stage}", lw=1.4
        )
    capacity = run.ledgers[0].capacity
    if capacity and capacity < 2 * run.peak_memory:
        ax.axhline(capacity / 2**30, color="black", linestyle=":", label="capacity")
    ax.set_ylim(bottom=0)
    worst = max(run.ledgers, key=lambda one: one.total)
    text = (
        f"The fullest stage is {worst.stage}, with {worst.total / 2**30:.1f} GiB, most of it {worst.largest}."
    )
    if capacity:
        text += f" The chip has {capacity / 2**30:.0f} GiB."
    numbers = {f"stage {s}, most [GiB]": run.ledgers[s].total / 2**30 for s in shown}
    return caption(fig, kind="modelled", text=text, numbers=numbers)


def operations(run: "DryRun", count: int = 10) -> str:
    """A table of the operators and messages that take most of the busiest rank's step (modelled)."""
    from fmlab.sim.tables import operations_table

    return operations_table(run, count)


# ---- drawing -----------------------------------------------------------------------------------------------


def _bars(result: "Replay", rank: Any, lanes: Sequence[str], low: float, high: float) -> list[Bar]:
    bars = []
    for lane in lanes:
        for i in result.on((rank, lane)):
            task, start, end = result.tasks[i], result.starts[i], result.ends[i]
            if end > low and start < high and task.seconds > 0:
                bars.append((_KINDS.get(task.kind, "messages"), start, task.seconds, task.name))
    return bars


def _gantt(
    rows: Sequence[Row],
    low: float,
    high: float,
    text: str,
    numbers: dict[str, float],
    unit: str = "",
    scale: float = 0.0,
    y_label: str = "stage",
) -> Captioned:
    if not scale:
        unit, scale = ("ms", 1e3) if high - low < 1 else ("s", 1.0)
    return caption(gantt(rows, low, high, unit, scale, y_label), kind="modelled", text=text, numbers=numbers)


def gantt(
    rows: Sequence[Row], low: float, high: float, unit: str, scale: float = 1.0, y_label: str = "stage"
) -> Any:
    """A figure with a row of bars for each name, and a thin one below for its messages."""
    talks = any(thin for _, _, thin in rows)
    fig, ax = figure(x=f"time [{unit}]", y=y_label, height=min(9.0, 1.3 + 0.42 * len(rows)))
    few = _has_numbers(rows)
    ax.set(xlim=(low * scale, high * scale), ylim=(len(rows) - 0.45, -0.55))
    for y, (_, bars, thin) in enumerate(rows):
        _draw(ax, bars, y - (0.12 if talks else 0), 0.6 if talks else 0.8, scale, few and not talks)
        _draw(ax, thin, y + 0.33, 0.22, scale, labels=False)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.grid(axis="y", visible=False)
    kinds = [kind for kind in STYLES if any(bar[0] == kind for _, a, b in rows for bar in (*a, *b))]
    patches = [_patch(kind) for kind in kinds]
    ax.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(patches), frameon=False)
    return fig


def _has_numbers(rows: Sequence[Row]) -> bool:
    """Whether there is room to write the number of the micro-batch into bars."""
    return sum(len(bars) for _, bars, _ in rows) <= MOST_LABELS


def _says_numbers(rows: Sequence[Row]) -> str:
    return " Numbers are micro-batches." if _has_numbers(rows) else ""


def _draw(ax: Any, bars: Sequence[Bar], y: float, height: float, scale: float, labels: bool) -> None:
    low, high = ax.get_xlim()
    thin = 0.4 if len(bars) < 120 else 0.05  # edges of very narrow bars would hide them
    for look in sorted({(kind, _chunk(name) % 2) for kind, _, _, name in bars}):
        spans = [(s * scale, n * scale) for kind, s, n, name in bars if (kind, _chunk(name) % 2) == look]
        colour, hatch = STYLES[look[0]]
        place, alpha = (y - height / 2, height), 0.55 if look[1] else 1
        ax.broken_barh(spans, place, facecolor=colour, hatch=hatch, edgecolor="white", lw=thin, alpha=alpha)
    for kind, start, length, name in bars if labels else ():
        number = name[1:].partition(".")[0]
        if kind.startswith(("forward", "backward")) and length * scale > 0.011 * len(number) * (high - low):
            x, dark = (start + length / 2) * scale, kind != "forward" or _chunk(name) % 2
            colour = "black" if dark else "white"
            ax.text(x, y, number, ha="center", va="center", fontsize=7.5, color=colour, clip_on=True)


def _chunk(name: str) -> int:
    """The chunk of a pass: 1 of "F3.1", 0 of "F3"."""
    number = name.partition(".")[2].partition(" ")[0]
    return int(number) if name[:1] in "FBW" and number.isdigit() else 0


def _patch(kind: str) -> Any:
    from fmlab.extras import require

    colour, hatch = STYLES[kind]
    patch = require("lab", "matplotlib.patches").Patch
    return patch(facecolor=colour, hatch=hatch, edgecolor="white", label=kind)
