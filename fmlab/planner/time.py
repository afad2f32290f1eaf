"""How long a step takes, line by line; the lines add up to the step.

    step_lines(setup, machine)["pipeline bubble"]         seconds
    FORMULAS["pipeline bubble"]                           how each line is worked out

The slowest stage of a pipeline sets the pace: every micro-batch takes its forward and its backward pass, and
what of its messages is not hidden. Before its first and after its last micro-batch it waits for the others:
the bubble, in the closed forms of the schedules (fmlab.sim.schedule.bubble_formula), with the stages' own
times instead of equal ones. At the end of the step gradients are summed and weights updated.
"""

from dataclasses import dataclass
from functools import cached_property

from fmlab.planner.calibration import Calibration
from fmlab.planner.hardware import Hardware
from fmlab.planner.passes import Pass, passes_of
from fmlab.planner.setup import Setup
from fmlab.planner.stages import Run, alike, chunks_of_stage, edge_bytes, neighbours, parameters_of
from fmlab.planner.wires import Group, Wires

#: line -> how it is worked out
FORMULAS: dict[str, str] = {
    "matrix products": "2 FLOPs a row and element, 6 with the backward pass / (peak x share by size)",
    "attention": "4 FLOPs a visible pair and unit of a head, 14 with the backward pass if fused / rate",
    "memory passes": "bytes that norms, additions, activations and the softmax move / (bandwidth x share)",
    "computed again": "recompute: forward passes of layers, or of attention's inside, once more",
    "launches": "what the host takes to start kernels, where that is longer than they run",
    "tensor messages": "an all-reduce of the stream for each half of a layer and direction",
    "context messages": "keys and values round the ring, or heads for positions",
    "expert messages": "tokens to their experts and back, forward and backward",
    "pipeline messages": "the stream to the next stage, its gradient to the one before",
    "gathered weights": "fully sharded: weights of each pass, its gradients summed, where not hidden",
    "pipeline bubble": "the passes of the other stages at both ends of the step, shorter by interleaving",
    "gradient messages": "gradients summed over data ranks, and new weights handed out, where not hidden",
    "tied tables": "a table's gradients on the first and the last stage",
    "host messages": "offload: gradients to the host's memory, new weights back / link, not hidden",
    "optimizer": "gradients, masters and moments read and written / (bandwidth x share)",
    "step": "data, logging, the host's own work",
}
#: which resource a line uses up
KINDS: dict[str, str] = {
    "matrix products": "compute",
    "attention": "compute",
    "computed again": "compute",
    "memory passes": "memory",
    "optimizer": "memory",
    "launches": "host",
    "step": "host",
    "pipeline bubble": "bubble",
}
MESSAGES = "messages"


@dataclass(frozen=True)
class StageTime:
    """One micro-batch through a stage: forward, backward, and what is computed again.

    sends: seconds of its messages to neighbours. gathers: of sharded weights and gradients, not hidden.
    launches: seconds by which starting kernels takes longer than running them.
    weight: the part of the backward pass that makes gradients of weights.
    walls: seconds of a forward and of a backward pass with the host's lateness; messages hide behind them.
    """

    forward: Pass
    backward: Pass
    again: Pass
    launches: float
    sends: float
    gathers: float
    weight: float
    walls: tuple[float, float] = (0.0, 0.0)

    @property
    def computed(self) -> float:
        """Forward, backward and again, with their messages."""
        return (
            self.forward.seconds + self.backward.seconds + self.again.seconds + self.launches + self.gathers
        )

    @cached_property
    def seconds(self) -> float:
        return self.computed + self.sends


NOTHING = StageTime(Pass(), Pass(), Pass(), 0.0, 0.0, 0.0, 0.0)


def stage_time(setup: Setup, stage: int, machine: Hardware) -> StageTime:
    """The passes of a stage, all its chunks together."""
    layout = setup.layout
    chunks = tuple(chunks_of_stage(setup.shape, layout, stage))
    others = neighbours(layout, stage)
    memo = setup.shape.memo
    key = ("stage", chunks, others, setup.stride("pipeline"), setup.key, setup.sharding, machine.key)
    if key not in memo:
        memo[key] = _stage_time(setup, [run for chunk in chunks for run in chunk], others, machine)
    found: StageTime = memo[key]
    return found


def _stage_time(setup: Setup, runs: list[Run], others: int, machine: Hardware) -> StageTime:
    layout = setup.layout
    forward, backward, again = Pass(), Pass(), Pass()
    for index, number in runs:
        one = passes_of(setup.shape.parts[index], setup, machine)
        forward, backward, again = (
            total.plus(part, number) for total, part in zip((forward, backward, again), one, strict=True)
        )
    # the host is late by so much, in each direction
    late_forward = max(0.0, forward.launches - forward.computed)
    late = max(0.0, backward.launches + again.launches - backward.computed - again.computed)
    walls = (forward.seconds + late_forward, backward.seconds + again.seconds + late)
    sends = 0.0
    if layout.pipeline > 1:
        wires = machine.need_wires(layout.world_size)
        payload = edge_bytes(setup, runs)
        one_way = wires.send(payload, setup.stride("pipeline"), layout.pipeline, machine.calibration)
        # each neighbour is sent one message a micro-batch and chunk; what it sends arrives at the same time
        sends = others * layout.virtual_stages * one_way * (1 - machine.calibration.hidden_pipeline)
    return StageTime(
        forward,
        backward,
        again,
        late_forward + late,
        sends,
        _gathers(setup, runs, machine, *walls),
        # of the backward pass's two products for each matrix, one; as much longer as the host makes it
        forward.products * max(1.0, backward.launches / max(backward.computed, 1e-12)),
        walls,
    )


# ---- data ranks --------------------------------------------------------------------------------------------


def _data_group(setup: Setup, wires: Wires, size: int, first: int = 1) -> Group:
    """Ranks along the data axis, `first` of its places apart."""
    return wires.group(size, setup.stride("data") * first)


def _gathers(setup: Setup, runs: list[Run], machine: Hardware, forward: float, backward: float) -> float:
    """Fully sharded weights: gathered for both passes, their gradients reduced and scattered, every time;
    what is longer than the pass that hides it."""
    if setup.stage_of_zero < 3 or setup.layout.data == 1:
        return 0.0
    wires, one = machine.need_wires(setup.layout.world_size), machine.calibration
    dense, experts = parameters_of(setup, runs)
    gather = scatter = 0.0
    for number, ranks, apart in (
        (dense, setup.shards, 1),
        (experts, setup.expert_shards, setup.layout.expert),
    ):
        if number and ranks > 1:
            group = _data_group(setup, wires, ranks, apart)
            gather += wires.seconds("all_gather", number * setup.product_bytes, group, one)
            scatter += wires.seconds("reduce_scatter", number * setup.states.gradients, group, one)
    again = gather if setup.layout.reshard or setup.layout.zero == 3 else 0.0
    hidden = one.hidden_gathers
    return max(0.0, gather - hidden * forward) + max(0.0, again + scatter - hidden * backward)


# region end
def end_of_step(setup: Setup, stage: int, machine: Hardware, time: StageTime) -> dict[str, float]:
    """What follows the passes on a stage: gradients summed, weights updated and handed out."""
    layout, one = setup.layout, machine.calibration
    runs = tuple(run for chunk in chunks_of_stage(setup.shape, layout, stage) for run in chunk)
    dense, experts = parameters_of(setup, runs)
    found = {"gradient messages": 0.0, "tied tables": 0.0}
    forward, backward = time.walls
    if layout.data * layout.context > 1:
        wires = machine.need_wires(layout.world_size)
        reduce = gather = 0.0
        for number, apart, experts_apart in ((dense, 1, 1), (experts, layout.expert, layout.expert)):
            part, more = _sum_gradients(setup, wires, number, apart, experts_apart, one)
            reduce, gather = reduce + part, gather + more
        found["gradient messages"] = max(0.0, reduce - one.hidden_gradients * backward)
        found["gradient messages"] += max(0.0, gather - one.hidden_gathers * forward)
    if layout.pipeline > 1 and setup.shape.tied and layout.schedule != "zbv":  # whose ends share a stage
        table = -(-setup.shape.vocab_size // layout.tensor) * setup.shape.width
        wires = machine.need_wires(layout.world_size)
        pair = wires.group(2, setup.stride("pipeline") * (layout.pipeline - 1))
        found["tied tables"] = wires.seconds("all_reduce", table * setup.states.gradients, pair, one)
    found["host messages"] = _host_bytes(setup, dense, experts) / one.host_link if _away(setup) else 0.0
    found["optimizer"] = _update_bytes(setup, dense, experts) / update_bandwidth(setup, machine)
    found["step"] = one.step
    return found


# endregion


def _sum_gradients(
    setup: Setup, wires: Wires, number: float, apart: int, expert: int, one: Calibration
) -> tuple[float, float]:
    """(seconds to sum gradients, seconds to hand out new weights) of parameters whose copies are `apart`."""
    layout = setup.layout
    ranks = layout.data * layout.context // expert
    if not number or ranks == 1:
        return 0.0, 0.0
    gradients, weights = number * setup.states.gradients, number * setup.states.weights
    stride = setup.stride("context") if layout.context > 1 and apart == 1 else setup.stride("data") * apart
    whole = wires.group(ranks, stride)
    if setup.stage_of_zero == 0:
        return wires.seconds("all_reduce", gradients, whole, one), 0.0
    shards = setup.shards if expert == 1 else setup.expert_shards
    between = 0.0
    copies = ranks // shards
    if copies > 1:  # hybrid sharding, or context ranks that hold the same states
        group = wires.group(copies, setup.stride("data") * shards)
        between = wires.seconds("all_reduce", gradients / shards, group, one)
    if setup.stage_of_zero == 3 or shards == 1:
        return between, 0.0
    inside = _data_group(setup, wires, shards, apart)
    scatter = wires.seconds("reduce_scatter", gradients, inside, one)
    return scatter + between, wires.seconds("all_gather", weights, inside, one)


def _away(setup: Setup) -> bool:
    return setup.layout.offload != "none"


def update_bandwidth(setup: Setup, machine: Hardware) -> float:
    """Bytes a second of the memory that the optimizer's states are in."""
    return machine.calibration.host_memory if _away(setup) else machine.bandwidth


def _host_bytes(setup: Setup, dense: float, experts: float) -> float:
    """Bytes of a step between a chip and its host: a rank's part of the gradients down and of the weights up,
    once (fully divided: gradients after each micro-batch; parameters on the host come up for each pass)."""
    part = dense / setup.shards + experts / setup.expert_shards
    batches = setup.layout.micro_batches if setup.stage_of_zero == 3 else 1
    if setup.layout.offload == "parameters":
        return part * batches * (setup.states.gradients + 2 * setup.product_bytes)
    return part * (batches * setup.states.gradients + setup.states.weights)


def _update_bytes(setup: Setup, dense: float, experts: float) -> float:
    """Bytes that the gradient's norm and a fused AdamW move: gradients read twice, states read and written,
    weights written (and read, where there is no master)."""
    states = setup.states
    each = 2 * states.gradients + 2 * states.masters + 2 * states.moments
    each += states.weights * (1 if states.masters else 2)
    if setup.stage_of_zero == 0:
        return (dense + experts) * each
    return (dense / setup.shards + experts / setup.expert_shards) * each


# ---- the step ----------------------------------------------------------------------------------------------


# region bubble
def bubble(setup: Setup, times: list[StageTime], slowest: int) -> float:
    """Seconds that the slowest stage waits. With equal stages it is that of bubble_formula:

    gpipe, 1f1b   the other stages' passes: (p-1) (F + B)
    interleaved   the same / virtual_stages
    zb-h1         the other stages' F + B - 2 W, for W fills what is left
    zbv           the other stages' F / 2
    """
    layout = setup.layout
    others = [time for stage, time in enumerate(times) if stage != slowest]
    if layout.schedule == "zb-h1":
        return sum(max(0.0, time.seconds - 2 * time.weight) for time in others)
    if layout.schedule == "zbv":
        return sum((time.forward.seconds + time.sends / 2) / 2 for time in others)
    return sum(time.seconds for time in others) / layout.virtual_stages


# endregion


def step_lines(setup: Setup, machine: Hardware) -> dict[str, float]:
    """Seconds of each line on the slowest stage; their sum is the step. Lines that are 0 are left out."""
    layout, m = setup.layout, setup.layout.micro_batches
    times: list[StageTime] = [NOTHING] * layout.pipeline
    for group in alike(setup.shape, layout):
        time = stage_time(setup, group[0], machine)
        for stage in group:
            times[stage] = time
    slowest = max(range(layout.pipeline), key=lambda stage: times[stage].seconds)
    time = times[slowest]
    both = time.forward.plus(time.backward)
    lines = {
        "matrix products": m * both.products,
        "attention": m * both.attention,
        "memory passes": m * both.memory,
        "computed again": m * time.again.computed,
        "launches": m * time.launches,
        "tensor messages": m * (both.tensor + time.again.tensor),
        "context messages": m * (both.context + time.again.context),
        "expert messages": m * (both.expert + time.again.expert),
        "pipeline messages": m * time.sends,
        "gathered weights": m * time.gathers,
        "pipeline bubble": bubble(setup, times, slowest) if layout.pipeline > 1 else 0.0,
        **_end(setup, machine, times, slowest),
    }
    return {name: lines[name] for name in FORMULAS if lines[name]}


def _end(setup: Setup, machine: Hardware, times: list[StageTime], slowest: int) -> dict[str, float]:
    """What ends the step: of the stage with the slowest passes; with offload, whose updates can take longer
    than all passes, of the stage that it takes longest."""
    if not _away(setup):
        return end_of_step(setup, slowest, machine, times[slowest])
    ends = [end_of_step(setup, stage, machine, time) for stage, time in enumerate(times)]
    return max(ends, key=lambda lines: sum(lines.values()))


def bounds(lines: dict[str, float]) -> str:
    """What takes most: "compute", "memory", "messages", "bubble" or "host"."""
    by_kind: dict[str, float] = {}
    for name, seconds in lines.items():
        kind = KINDS.get(name, MESSAGES)
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    return max(by_kind, key=by_kind.__getitem__)
