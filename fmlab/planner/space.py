"""Which layouts a model, so many chips and a batch can have, and what each of them takes at the least.

    space = Space(shape, machine, settings, chips=3072, global_batch=3072, lengths={"tokens": 2048}, only={})
    for family in space.families():        degrees, micro-batch, recompute: layers cost the same in all of it
        for way in space.ways(family):     schedule, chunks of a stage, what data ranks divide
            space.least(family, way)       seconds that a step takes at least

A bound must never be above the truth: whoever prunes by it loses no winner. It leaves out what a family does
not decide (messages between stages, gradients, the optimizer, a host that is late), and puts the mean of the
stages where the slowest one counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fmlab.parallel import Layout
from fmlab.parallel.grid import divisors
from fmlab.planner import memory
from fmlab.planner.activations import kept_bytes
from fmlab.planner.hardware import Hardware
from fmlab.planner.modelshape import ModelShape
from fmlab.planner.passes import passes_of
from fmlab.planner.setup import Setup
from fmlab.planner.stages import Run, alike, chunks_of_stage, parameters_of, parts_of_stage, passes_held

FEWEST_POSITIONS = 2048  # that a context rank keeps of a row, unless a search is told its degrees
#: (zero, fsdp)
DIVIDED = ((0, False), (1, False), (2, False), (0, True), (3, False))
#: fields of a layout that a search chooses
CHOSEN = (
    "data",
    "tensor",
    "sequence_parallel",
    "context",
    "context_method",
    "expert",
    "pipeline",
    "schedule",
    "virtual_stages",
    "micro_batches",
    "recompute",
    "zero",
    "fsdp",
)


class Family(NamedTuple):
    """Layouts whose layers take the same time: degrees, rows of a micro-batch, what is computed again."""

    chips: int
    data: int
    tensor: int
    sequence_parallel: bool
    context: int
    context_method: str
    expert: int
    pipeline: int
    micro_batches: int
    rows: int
    recompute: str


class Way(NamedTuple):
    """How a family's stages take turns, and what its data ranks divide."""

    schedule: str
    virtual_stages: int
    zero: int
    fsdp: bool


@dataclass(frozen=True)
class Space:
    """All layouts of a search on one number of chips.

    settings: the further fields of a Setup (precision, states, …). most_tensor: the highest tensor degree.
    only: field of a layout -> the values it may have.
    """

    shape: ModelShape
    machine: Hardware
    settings: Mapping[str, Any]
    chips: int
    global_batch: int
    seq_len: int | Mapping[str, int] | None
    flops_convention: str
    most_tensor: int
    only: Mapping[str, tuple[Any, ...]]

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Positions of a row in each stream."""
        return self.shape.lengths(self.seq_len)

    def _may(self, field: str, value: Any) -> bool:
        return field not in self.only or value in self.only[field]

    # ---- what there is -------------------------------------------------------------------------------------

    def families(self) -> Iterator[Family]:
        """All that are legal."""
        for tensor, (context, method), pipeline in self._degrees():
            data = self.chips // (tensor * context * pipeline)
            if self.global_batch % data or not self._may("data", data):
                continue
            of_replica = self.global_batch // data
            experts = [n for n in divisors(max(1, self.shape.experts)) if data % n == 0]
            for micro_batches in divisors(of_replica):
                if not self._may("micro_batches", micro_batches):
                    continue
                rows = of_replica // micro_batches
                for expert in (n for n in experts if self._may("expert", n)):
                    for sequence in (False, True) if tensor > 1 else (False,):
                        for again in self._recompute():
                            if self._may("sequence_parallel", sequence):
                                yield Family(
                                    self.chips, data, tensor, sequence, context, method, expert, pipeline,
                                    micro_batches, rows, again,
                                )  # fmt: skip

    def _recompute(self) -> tuple[str, ...]:
        """What may be computed again. Of a fused attention "selective" is nothing: it is left out."""
        nothing = (
            self.settings.get("attention", "fused") == "fused"
            and self.settings.get("activations", "fmlab") == "fmlab"
            and not any(group.score_bias for group in self.shape.layers)
            and "recompute" not in self.only
        )
        found = ("none", "full") if nothing else ("none", "selective", "full")
        return tuple(one for one in found if self._may("recompute", one))

    def _degrees(self) -> Iterator[tuple[int, tuple[int, str], int]]:
        """(tensor, (context, its method), pipeline) that the model can be divided by."""
        for tensor in divisors(self.chips):
            if tensor > self.most_tensor or not self._may("tensor", tensor) or not self._divides(tensor):
                continue
            for context, method in self._contexts(tensor):
                for pipeline in divisors(self.chips // tensor // context):
                    if pipeline <= self.shape.num_layers and self._may("pipeline", pipeline):
                        yield tensor, (context, method), pipeline

    def _divides(self, tensor: int) -> bool:
        try:
            for part in self.shape.parts:
                part.on(tensor)
        except ValueError:
            return False
        return True

    def _contexts(self, tensor: int) -> Iterator[tuple[int, str]]:
        one_stream = len(self.lengths) == 1 and self.shape.vocab_size > 0
        length = next(iter(self.lengths.values()))
        for context in divisors(self.chips // tensor):
            if context > 1 and (not one_stream or context > length):
                break
            enough = context == 1 or "context" in self.only or length // context >= FEWEST_POSITIONS
            if not enough or length % context or not self._may("context", context):
                continue
            if self._may("context_method", "ring"):
                yield context, "ring"
            heads = [group.heads // tensor for group in self.shape.layers]
            whole_heads = context > 1 and not any(number % context for number in heads)
            if whole_heads and self._may("context_method", "ulysses"):
                yield context, "ulysses"

    def ways(self, family: Family) -> tuple[Way, ...]:
        """Schedules, chunks of a stage, and what the data ranks divide.

        A stage has several chunks only where all chunks have as many layers. Full sharding by zero=3 and by
        fsdp cost the same in a plan: it counts once, as fsdp, unless `only` asks for the other.
        """
        stages, once = family.pipeline, family.micro_batches % family.pipeline == 0
        key = (stages, once, family.data > 1)
        if key not in self._ways:
            self._ways[key] = tuple(
                Way(schedule, chunks, zero, fsdp)
                for schedule, chunks in self._schedules(stages, once)
                for zero, fsdp in (DIVIDED if family.data > 1 else DIVIDED[:1])
                if self._may("zero", zero) and self._may("fsdp", fsdp)
                if zero < 3 or "zero" in self.only
            )
        return self._ways[key]

    @cached_property
    def _ways(self) -> dict[tuple[int, bool, bool], tuple[Way, ...]]:
        return {}

    def _schedules(self, stages: int, in_groups: bool) -> Iterator[tuple[str, int]]:
        layers = self.shape.num_layers
        found = [("1f1b", 1)]
        if stages > 1:
            found += [("gpipe", 1), ("zb-h1", 1)]
            if 2 * stages <= layers:
                found.append(("zbv", 2))
            if in_groups and layers % stages == 0:
                found += [("interleaved", n) for n in divisors(layers // stages) if n > 1]
        for schedule, chunks in found:
            if self._may("schedule", schedule) and self._may("virtual_stages", chunks):
                yield schedule, chunks

    # ---- one of them ---------------------------------------------------------------------------------------

    def setup(self, family: Family, way: Way) -> Setup:
        """What the formulas of memory and time read."""
        layout = Layout(
            data=family.data,
            tensor=family.tensor,
            sequence_parallel=family.sequence_parallel,
            context=family.context,
            context_method=family.context_method,
            expert=family.expert,
            pipeline=family.pipeline,
            schedule=way.schedule,
            virtual_stages=way.virtual_stages,
            micro_batches=family.micro_batches,
            recompute=family.recompute,
            zero=way.zero,
            fsdp=way.fsdp,
        )
        return Setup(
            self.shape, layout, family.rows, self.lengths, recompute=family.recompute, **self.settings
        )

    # ---- bounds --------------------------------------------------------------------------------------------

    # region least
    def least(self, family: Family, way: Way | None = None) -> float:
        """Seconds that a step takes at least; without a way, in the best of them.

        The slowest stage takes at least its part of the time that all stages take for a micro-batch, and at
        least as long as the most layers that a stage holds. It works once for each micro-batch, and waits as
        fmlab.planner.time.bubble says, where its own part is taken off at its largest.
        """
        work, m, stages = self._blocks(family), family.micro_batches, family.pipeline
        slowest = max(work.seconds / stages, work.layer * -(-self.shape.num_layers // stages))
        waits = 0.0
        if way is not None and stages > 1:
            if way.schedule == "zb-h1":
                waits = work.seconds - 2 * work.weight - slowest
            elif way.schedule == "zbv":
                waits = (work.forward - slowest) / 2
            else:
                waits = (work.seconds - slowest) / way.virtual_stages
        return (m * slowest + max(0.0, waits)) * (1 - 1e-9)

    # endregion

    # region least memory
    def least_memory(self, family: Family, way: Way) -> float:
        """Bytes that a rank of the fullest stage holds at least: of the first stage, weights, what belongs to
        them and what its passes in flight keep; or weights and what belongs to them, of any stage."""
        states, first, runs, chunks = self._stages(family, way)
        kept = self._blocks(family).kept
        flight = passes_held(way.schedule, family.pipeline, family.micro_batches, way.virtual_stages, 0)
        held = sum(number * kept[index] for index, number in runs) / chunks * flight
        one = self.machine.calibration
        return (max(states, first + held) + one.context_bytes) * (1 + one.reserve) * (1 - 1e-9)

    # endregion

    def _blocks(self, family: Family) -> "Blocks":
        key = (*family[2:7], family.rows, family.recompute)
        if key not in self._of_blocks:
            alone = family._replace(data=family.expert, pipeline=1, micro_batches=1)
            setup = self.setup(alone, Way("1f1b", 1, 0, False))
            self._of_blocks[key] = _blocks(setup, self.machine)
        return self._of_blocks[key]

    @cached_property
    def _of_blocks(self) -> dict[tuple[object, ...], "Blocks"]:
        return {}

    def _stages(self, family: Family, way: Way) -> tuple[float, float, Sequence[Run], int]:
        """(bytes of states of the fullest stage, of the first, the first's parts, its chunks)."""
        key = (family.tensor, family.context, family.expert, family.pipeline, way.virtual_stages,
               way.schedule == "zbv", way.zero, way.fsdp)  # fmt: skip
        if key not in self._of_stages:
            setup = self.setup(family, way)
            layout = setup.layout
            held = [
                memory.total(
                    memory.state_lines(setup, *parameters_of(setup, parts_of_stage(self.shape, layout, one)))
                )
                for one, *_ in alike(self.shape, layout)
            ]
            first = parts_of_stage(self.shape, layout, 0)
            self._of_stages[key] = (max(held), held[0], first, len(chunks_of_stage(self.shape, layout, 0)))
        return self._of_stages[key]

    @cached_property
    def _of_stages(self) -> dict[tuple[object, ...], tuple[float, float, Sequence[Run], int]]:
        return {}


class Blocks(NamedTuple):
    """Of a micro-batch: seconds there and back through the whole model, those of the forward pass and (at
    most) of the gradients of weights; there and back through the quickest layer; bytes that each part keeps.
    """

    seconds: float
    forward: float
    weight: float
    layer: float
    kept: tuple[float, ...]


def _blocks(setup: Setup, machine: Hardware) -> Blocks:
    seconds, forward, weight, layer = 0.0, 0.0, 0.0, float("inf")
    for part in setup.shape.parts:
        there, back, again = passes_of(part, setup, machine)
        each = there.seconds + back.seconds + again.seconds
        seconds += part.count * each
        forward += part.count * there.seconds
        weight += part.count * (
            there.products + back.launches / 2
        )  # a late host stretches it, to half of that
        if part.starts:
            layer = min(layer, each)
    return Blocks(seconds, forward, weight, layer, tuple(kept_bytes(one, setup) for one in setup.shape.parts))
