"""The memory of a rank through a step: what it holds after each pass, and where the peak is.

    over = memory_over_time(setup, stage, calibration)        or Plan.memory_over_time(stage)
    print(over)                                               a bar for each moment
    over.peak.name, over.peak.total, over.what_peaks          which pass, bytes, the line
    [(moment.name, moment.lines) for moment in over.moments]

The passes come in the order of the schedule (fmlab.sim.schedule). Weights, masters and moments are there all
the time. A forward pass adds its activations, the backward pass takes them away and leaves gradients: those
of the first micro-batch are new, all others are added to them. So memory is highest where most passes are
held and gradients are there already, and `Plan.peak_memory` is that moment; with one micro-batch it never
comes: the gradients grow while the activations go, and the peak is lower.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fmlab.parallel import Layout
from fmlab.planner.calibration import Calibration
from fmlab.planner.memory import pieces, stage_memory
from fmlab.planner.setup import Setup
from fmlab.planner.stages import Chunk, chunks_of_stage, parameters_of
from fmlab.sim.actions import Action
from fmlab.sim.schedule import schedule

#: lines that are there from the first pass to the update
ALWAYS = ("weights", "masters", "moments", "communication buffers", "runtime", "reserve")
SHOWN = 40  # moments of a printed series
BAR = 32  # characters of the highest bar


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment. name: which pass. passes: whose activations are held. lines: bytes."""

    name: str
    passes: int
    lines: dict[str, float]

    @cached_property
    def total(self) -> float:
        return sum(self.lines.values())


@dataclass(frozen=True)
class MemoryOverTime:
    """A rank of one stage, moment by moment. Everything is modelled.

    repeated: micro-batches of the middle of a step that are left out, for they only repeat the one before.
    """

    stage: int
    moments: tuple[Moment, ...]
    repeated: int = 0

    @cached_property
    def peak(self) -> Moment:
        """The first of the moments with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def what_peaks(self) -> str:
        """Of the lines that come and go, the largest at the peak: what to save first."""
        found = {name: value for name, value in self.peak.lines.items() if name not in ALWAYS}
        return max(found or self.peak.lines, key=lambda name: self.peak.lines[name])

    def series(self, line: str | None = None) -> list[float]:
        """Bytes at each moment: of a line, or in all. Raises ValueError for a line that never is."""
        if line is None:
            return [moment.total for moment in self.moments]
        known = list(dict.fromkeys(name for moment in self.moments for name in moment.lines))
        if line not in known:
            raise ValueError(f"no moment has a line {line!r}; there are {', '.join(known)}")
        return [moment.lines.get(line, 0.0) for moment in self.moments]

    def __str__(self) -> str:
        from fmlab.planner.tables import gib

        peak = self.peak
        highest = (
            f"highest {gib(peak.total)} at {peak.name}, most of what comes and goes is {self.what_peaks}"
        )
        rows = [f"memory over time, stage {self.stage}: {highest}"]
        for moment in self._some():
            bar = "#" * max(1, round(BAR * moment.total / peak.total))
            mark = "  <- peak" if moment is peak else ""
            rows.append(f"  {moment.name:32} {gib(moment.total):>12}  {bar:{BAR}}{mark}".rstrip())
        if self.repeated:
            rows.append(f"  ({self.repeated:,} more micro-batches like those in the middle are left out)")
        return "\n".join(rows)

    def _some(self) -> Sequence[Moment]:
        """At most SHOWN moments: even steps, with the peak, the first and the last."""
        many = len(self.moments)
        if many <= SHOWN:
            return self.moments
        places = {round(i * (many - 1) / (SHOWN - 2)) for i in range(SHOWN - 1)}
        places.add(self.moments.index(self.peak))
        return [self.moments[place] for place in sorted(places)]


def memory_over_time(setup: Setup, stage: int, calibration: Calibration) -> MemoryOverTime:
    """What a rank of this stage holds through a step, pass by pass.

    Of many micro-batches the first and the last are walked through; the middle, which repeats, is left out.
    """
    shown = _shown(setup.layout)
    moments = tuple(_moments(setup, stage, calibration, _actions(setup.layout, stage, shown)))
    return MemoryOverTime(stage, moments, setup.layout.micro_batches - shown)


# region walk
def _moments(
    setup: Setup, stage: int, calibration: Calibration, actions: Sequence[Action]
) -> Iterator[Moment]:
    held = stage_memory(setup, stage, calibration)
    parts = pieces(setup, stage)
    always = {name: held[name] for name in ALWAYS if name in held}
    chunks = chunks_of_stage(setup.shape, setup.layout, stage)
    shares = _gradient_shares(setup, chunks, parts["gradients"])
    gathered = _only(parts, "gathered layers")
    backward = gathered | _only(parts, "layer computed again", "working memory", "gradients in flight")
    passes, waiting, there = 0, 0, dict[int, float]()
    if setup.layout.data * setup.layout.context > 1 and setup.stage_of_zero < 2:
        there = dict(shares)  # buckets are made once, and kept from step to step

    def moment(name: str, extra: dict[str, float]) -> Moment:
        coming = {"gradients": sum(there.values()), "activations": passes * parts["activations"]}
        coming["waiting gradients"] = waiting * parts["waiting gradients"]
        lines = always | coming | extra
        return Moment(name, passes, {name: value for name, value in lines.items() if value})

    for action in actions:
        name = _name(action, len(chunks))
        if action.direction == "forward":
            passes += 1
            yield moment(name, gathered)
            if parts["logits"] and action.chunk == len(chunks) - 1:
                yield moment(f"loss of micro-batch {action.micro_batch}", gathered | _only(parts, "logits"))
            continue
        waiting += action.direction == "input"  # the gradients that the weights' are made of
        yield moment(f"{name}, begins", backward)
        if action.direction != "input":
            passes -= 1
            waiting -= action.direction == "weight"
            there[action.chunk] = shares[action.chunk]
        yield moment(f"{name}, ends", backward)
    yield moment("update", {})


# endregion


def _only(parts: dict[str, float], *names: str) -> dict[str, float]:
    return {name: parts[name] for name in names if parts.get(name)}


def _name(action: Action, chunks: int) -> str:
    what = {"input": "backward", "weight": "weights' backward"}.get(action.direction, action.direction)
    where = f", chunk {action.chunk}" if chunks > 1 else ""
    return f"{what} of micro-batch {action.micro_batch}{where}"


def _gradient_shares(setup: Setup, chunks: Sequence[Chunk], gradients: float) -> dict[int, float]:
    """Bytes of gradients that each chunk's first backward pass leaves."""
    counts = [sum(parameters_of(setup, chunk)) for chunk in chunks]
    return {number: gradients * count / sum(counts) for number, count in enumerate(counts)}


def _shown(layout: Layout) -> int:
    """As many micro-batches as bring a stage to what it holds most; gpipe holds all of them."""
    if layout.schedule == "gpipe" and layout.pipeline > 1:
        return layout.micro_batches
    return min(layout.micro_batches, max(4, 2 * layout.pipeline))


def _actions(layout: Layout, stage: int, batches: int) -> Sequence[Action]:
    if layout.pipeline == 1:
        return [Action(way, i) for i in range(batches) for way in ("forward", "backward")]
    if layout.schedule == "gpipe":
        return [Action(way, i) for way in ("forward", "backward") for i in range(batches)]
    return schedule(layout.schedule, layout.pipeline, batches, layout.virtual_stages)[stage]
