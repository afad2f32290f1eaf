"""A plan: what a training step needs and how long it takes, every line with its formula.

    one = plan("gpt3-175b", chip="a100-80gb", chips=1024, layout=Layout(data=8, tensor=8, pipeline=16,
               micro_batches=192, sequence_parallel=True), global_batch=1536, seq_len=2048,
               recompute="selective")
    print(one)                        memory and time line by line, utilisation, what bounds
    one.step_seconds, one.mfu, one.fits
    one.time["pipeline bubble"]       a line: its value, and how it is worked out

Pure arithmetic on shapes: no model is built, and a plan for thousands of chips takes about a millisecond.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from fmlab.chips import Chip
from fmlab.parallel import Layout, legal
from fmlab.parallel.values import one_of, whole
from fmlab.planner import memory, time
from fmlab.planner.calibration import Calibration
from fmlab.planner.fitting import check_layout, nearby
from fmlab.planner.flops import RECOMPUTE, Flops, check_convention, flops_per_step
from fmlab.planner.hardware import Hardware, hardware
from fmlab.planner.modelshape import ModelShape
from fmlab.planner.parts import MOST
from fmlab.planner.payloads import Payloads, payloads
from fmlab.planner.setup import ACTIVATIONS, ATTENTION, LOGITS, PRECISIONS, STATES, Setup
from fmlab.planner.shapes import model_shape
from fmlab.planner.timeline import MemoryOverTime, memory_over_time


@dataclass(frozen=True)
class Line:
    """One line of a plan: bytes ("B") or seconds ("s") that are modelled, and how they are worked out."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True, repr=False)
class Plan:
    """A modelled training step. Every number is modelled.

    setup:   model, layout, and how numbers are kept
    machine: chip, wires, calibration
    chips:   as many as the layout has ranks
    """

    setup: Setup
    machine: Hardware
    global_batch: int
    seq_len: int | Mapping[str, int] | None
    flops_convention: str

    # ---- time ----------------------------------------------------------------------------------------------

    @cached_property
    def _times(self) -> dict[str, float]:
        return time.step_lines(self.setup, self.machine)

    @property
    def time(self) -> dict[str, Line]:
        """The lines of a step on the slowest stage, by name; they add up to `step_seconds`."""
        return {name: Line(name, value, "s", time.FORMULAS[name]) for name, value in self._times.items()}

    @cached_property
    def step_seconds(self) -> float:
        return sum(self._times.values())

    @property
    def bound(self) -> str:
        """What takes most of a step: "compute", "memory", "messages", "bubble" or "host"."""
        return time.bounds(self._times)

    @property
    def bubble(self) -> float:
        """The share of a step that the slowest stage waits for the others."""
        return self._times.get("pipeline bubble", 0.0) / self.step_seconds

    @property
    def chips(self) -> int:
        return self.setup.layout.world_size

    @property
    def tokens_per_step(self) -> int:
        """Of all streams of text together; of pictures, their positions."""
        return self.global_batch * self.setup.shape.tokens(self.seq_len)

    @property
    def tokens_per_second(self) -> float:
        """Of all chips together."""
        return self.tokens_per_step / self.step_seconds

    @property
    def samples_per_second(self) -> float:
        """Rows of the batch, of all chips together."""
        return self.global_batch / self.step_seconds

    @cached_property
    def flops(self) -> Flops:
        """FLOPs of a step by the plan's convention."""
        return self.flops_by(self.flops_convention)

    def flops_by(self, convention: str) -> Flops:
        """FLOPs of a step by another convention (fmlab.planner.flops)."""
        setup = self.setup
        return flops_per_step(setup.shape, self.global_batch, self.seq_len, convention, setup.recompute)

    @property
    def peak_flops(self) -> float:
        """Published, of one chip, dense, in the plan's precision."""
        return self.machine.peak(self.setup.precision)

    @property
    def mfu(self) -> float:
        """Model FLOPs a second over the published peak of all chips, by the plan's convention."""
        return self.flops.utilisation(self.step_seconds, self.chips, self.peak_flops)

    @property
    def hfu(self) -> float:
        """The same with what is computed again."""
        return self.flops.utilisation(self.step_seconds, self.chips, self.peak_flops, hardware=True)

    # ---- messages ------------------------------------------------------------------------------------------

    def payloads(self, stage: int = 0) -> Payloads:
        """Bytes that a rank of a stage hands to each collective in a step, by line of time."""
        self.memory_of(stage)  # raises for a stage that there is not
        return payloads(self.setup, stage)

    # ---- memory --------------------------------------------------------------------------------------------

    def memory_of(self, stage: int) -> dict[str, float]:
        """Bytes of each line on a rank of a stage."""
        if not 0 <= stage < self.setup.layout.pipeline:
            raise ValueError(f"stage={stage!r}: legal are 0 to {self.setup.layout.pipeline - 1}")
        return memory.stage_memory(self.setup, stage, self.machine.calibration)

    @property
    def host_memory(self) -> dict[str, float]:
        """Bytes of each line that a rank of the fullest stage keeps in its host's memory; {} if none."""
        return memory.host_lines(self.setup, self.fullest_stage)

    def memory_over_time(self, stage: int | None = None) -> MemoryOverTime:
        """What a rank of a stage (default: the fullest) holds through a step, pass by pass."""
        stage = self.fullest_stage if stage is None else stage
        self.memory_of(stage)  # raises for a stage that there is not
        return memory_over_time(self.setup, stage, self.machine.calibration)

    @cached_property
    def _fullest(self) -> tuple[int, dict[str, float]]:
        return memory.fullest_stage(self.setup, self.machine.calibration)

    @property
    def fullest_stage(self) -> int:
        """The stage whose ranks hold most."""
        return self._fullest[0]

    @property
    def memory(self) -> dict[str, Line]:
        """The lines of a rank of the fullest stage, by name."""
        lines = self._fullest[1]
        return {name: Line(name, value, "B", memory.FORMULAS[name]) for name, value in lines.items()}

    @property
    def peak_memory(self) -> float:
        """Bytes on a rank of the fullest stage."""
        return sum(self._fullest[1].values())

    @property
    def capacity(self) -> int | None:
        """Bytes of a chip; None where no source gives them."""
        return self.machine.capacity

    @property
    def fits(self) -> bool | None:
        """Whether the fullest stage fits its chip; None where the chip's memory is not known."""
        return None if self.capacity is None else self.peak_memory <= self.capacity

    @property
    def lacking(self) -> float:
        """Bytes that a rank of the fullest stage lacks; 0 where it fits. ValueError for an unknown memory."""
        if self.capacity is None:
            raise ValueError(f"no source gives the memory of {self.machine.chip.name}")
        return max(0.0, self.peak_memory - self.capacity)

    def explain(self, line: str) -> str:
        """A line's formula, and the numbers that it was worked out with (fmlab.planner.explain)."""
        from fmlab.planner.explain import numbers

        said = numbers(self, line)  # raises for a line that there is not
        one = self.memory.get(line) or self.time[line]
        return f"{line}: {one.formula}" + (f"\n  = {said}" if said else "")

    # ---- other plans ---------------------------------------------------------------------------------------

    def changed(self, recompute: str | None = None, **layout: Any) -> "Plan":
        """The same with other fields of the layout or another recompute. Raises ValueError like `plan`."""
        setup = self.setup
        return plan(
            setup.shape,
            layout=replace(setup.layout, **layout) if layout else setup.layout,
            machine=self.machine,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            recompute=recompute or setup.recompute,
            precision=setup.precision,
            states=next(name for name, one in STATES.items() if one == setup.states),
            attention=setup.attention,
            dropout=setup.dropout,
            logits=setup.logits,
            activations=setup.activations,
            split_experts=setup.split_experts,
            flops_convention=self.flops_convention,
        )

    def what_would_fit(self) -> list[tuple[str, "Plan"]]:
        """Changes after which the step fits on as many chips, the fastest first; [] if it fits as it is.

        One change of how states are divided and one of how activations are kept, or either alone.
        """
        if self.fits is not False:
            return []
        states, kept = (nearby(self.setup, kind) for kind in ("states", "activations"))
        found: dict[tuple[str, str], Plan] = {}
        for (one, change), (other, more) in product([("", {}), *states], [("", {}), *kept]):
            if (one, "") in found or ("", other) in found or change.keys() & more.keys():
                continue  # one of the two is enough
            try:
                made = self.changed(**change, **more)
            except ValueError:
                continue
            if made.fits:
                found[one, other] = made
        named = [(", ".join(filter(None, both)), made) for both, made in found.items()]
        return sorted(named, key=lambda pair: pair[1].step_seconds)

    # ---- words ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        fits = {True: "fits", False: "does not fit", None: "memory unknown"}[self.fits]
        return (
            f"<Plan: {self.setup.shape.name} on {self.chips} x {self.machine.chip.name}, "
            f"step {self.step_seconds:.3g} s, MFU {self.mfu:.1%}, {fits}>"
        )

    def __str__(self) -> str:
        from fmlab.planner.tables import text

        return text(self)

    def _repr_html_(self) -> str:
        from fmlab.planner.tables import html

        return html(self)


def plan(
    model: str | ModelShape | Any,
    *,
    chip: str | Chip | None = None,
    chips: int | None = None,
    layout: Layout | None = None,
    global_batch: int,
    seq_len: int | Mapping[str, int] | None = None,
    recompute: str | None = None,
    flops_convention: str = "full-attention",
    calibration: Calibration | None = None,
    host: str | None = None,
    network_bandwidth: float | None = None,
    precision: str = "bf16",
    states: str = "mixed-16",
    attention: str = "fused",
    dropout: bool = False,
    logits: str = "chunked",
    activations: str = "fmlab",
    split_experts: bool = False,
    machine: Hardware | None = None,
) -> Plan:
    """Plan one training step.

    Args:
        model: a preset of fmlab.models, a config, a model (on meta, too), or a ModelShape.
        chip, host: see fmlab.planner.hardware; one of them is needed. chips: to check the layout against.
        layout: how the step is divided (default: one chip). Its `precision` says how fmlab.parallel would
            train; a plan's is `precision` below.
        global_batch: rows of a step over all replicas and micro-batches.
        seq_len: tokens of a row; of several streams, one number or one for each by name.
        recompute: instead of the layout's.
        flops_convention: of the utilisation, see fmlab.planner.flops.
        calibration: default: as fitted to published runs.
        network_bandwidth: bytes a second of a host, one way, instead of the published figure.
        precision: of matrix products. states: bytes of a parameter, see fmlab.planner.setup.STATES.
        attention, dropout, logits, activations, split_experts: see fmlab.planner.setup.Setup.
        machine: instead of chip, host, network_bandwidth and calibration, where many plans share one.

    Raises ValueError, with what is legal, for anything that cannot be. A plan that does not fit its chips is
    no error: it says so, and by how much.
    """
    shape = model_shape(model)
    layout = Layout() if layout is None else layout
    if not isinstance(layout, Layout):
        raise ValueError(f"layout={layout!r}: give a fmlab.parallel.Layout")
    if machine is None:
        machine = hardware(chip, host, network_bandwidth, calibration)
    elif any(one is not None for one in (chip, host, network_bandwidth, calibration)):
        raise ValueError("machine= brings its chip, host, network and calibration: leave the others out")
    check_convention(flops_convention)
    recompute = layout.recompute if recompute is None else recompute
    if recompute == "budget":
        raise ValueError(
            "recompute='budget' chooses layers by what a first step measures, which no plan knows: legal are "
            f"{', '.join(RECOMPUTE)}, and a budget's step lies between those of none and full"
        )
    one_of(recompute, RECOMPUTE, f"recompute={recompute!r}")
    one_of(precision, PRECISIONS, f"precision={precision!r}")
    one_of(states, tuple(STATES), f"states={states!r}")
    one_of(attention, ATTENTION, f"attention={attention!r}")
    one_of(logits, LOGITS, f"logits={logits!r}")
    one_of(activations, ACTIVATIONS, f"activations={activations!r}")
    for name, flag in (("dropout", dropout), ("split_experts", split_experts)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}={flag!r}: give True or False")
    if whole(global_batch, f"global_batch={global_batch!r}") > MOST:
        raise ValueError(f"global_batch={global_batch}: more than {MOST} rows cannot be meant")
    lengths = shape.lengths(seq_len)
    legal.check(layout, layout.world_size if chips is None else chips, global_batch)
    check_layout(shape, layout, lengths, machine)
    machine.peak(precision)  # raises for a type without one
    setup = Setup(
        shape,
        layout,
        global_batch // (layout.data * layout.micro_batches),
        lengths,
        precision,
        STATES[states],
        attention,
        dropout,
        logits,
        activations,
        recompute,
        split_experts,
    )
    return Plan(setup, machine, global_batch, seq_len, flops_convention)
