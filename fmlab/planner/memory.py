"""What a rank of each pipeline stage holds, line by line, at the worst moment of a step.

    lines = stage_memory(setup, stage=0, calibration)     {"weights": 2.7e9, ...} in bytes
    FORMULAS["activations"]                               how each line is worked out

States follow ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054, figure 1), activations
fmlab.planner.activations, times the micro-batches in flight (fmlab.planner.stages).
"""

from collections.abc import Iterable, Mapping

from fmlab.planner.activations import kept_bytes, logits_bytes, waiting_bytes
from fmlab.planner.calibration import Calibration
from fmlab.planner.parts import Embedding, Head, LayerGroup
from fmlab.planner.setup import Setup
from fmlab.planner.stages import (
    alike,
    chunks_of_stage,
    edge_bytes,
    in_flight,
    neighbours,
    parameters_of,
    passes_waiting,
)

#: line -> how it is worked out
FORMULAS: dict[str, str] = {
    "weights": "parameters on the rank x bytes of a weight (/ data ranks from ZeRO 3 on, or fully sharded)",
    "gradients": "parameters on the rank x bytes of a gradient (/ data ranks from ZeRO 2 on)",
    "masters": "parameters on the rank x 4, beside 16-bit weights (/ data ranks from ZeRO 1 on)",
    "moments": "parameters on the rank x 8: Adam's two in fp32 (/ data ranks from ZeRO 1 on)",
    "activations": "what each block keeps of a micro-batch x passes in flight",
    "waiting gradients": "zero bubble: gradients of what matrices gave x passes whose weights wait",
    "layer computed again": "recompute: one layer's activations, back for its backward pass",
    "working memory": "gradients of the widest tensors of a layer while its backward pass runs",
    "logits": "those of a micro-batch while the loss is computed, where that is the worse moment",
    "gathered layers": "fully sharded: the layer at work, the next one, and tables; reshard=False: all",
    "gradients in flight": "ZeRO 2 and up: the layer whose gradients are on their way, twice",
    "communication buffers": "two gradient buckets; what a stage receives from its neighbours",
    "runtime": "what the chip's runtime and the communication library take themselves",
    "reserve": "a share of all lines above, for an allocator's rounding and fragmentation",
}


# region states
def state_lines(setup: Setup, dense: float, experts: float) -> dict[str, float]:
    """Weights, gradients, masters and moments of a rank.

    dense, experts: its parameters before data ranks divide any, see stages.parameters_of.
    """
    states, zero = setup.states, setup.stage_of_zero
    on_host = setup.layout.offload

    def share(each: float, least: int) -> float:
        return _share(setup, dense, experts, each) if zero >= least else (dense + experts) * each

    away = on_host != "none"  # states that only the update needs live in the host's memory
    sent_at_once = away and zero >= 2  # with ZeRO 1 gradients stay until the end of the step
    return {
        "weights": 0.0 if on_host == "parameters" else share(states.weights, 3),
        "gradients": 0.0 if sent_at_once else share(states.gradients, 2),
        "masters": 0.0 if away else share(states.masters, 1),
        "moments": 0.0 if away else share(states.moments, 1),
    }


# endregion


def host_lines(setup: Setup, stage: int) -> dict[str, float]:
    """Bytes that a rank of this stage keeps in its host's memory: with offload its part of the gradients, the
    moments, and the weights that the update works on, in fp32; else nothing."""
    if setup.layout.offload == "none":
        return {}
    runs = [run for chunk in chunks_of_stage(setup.shape, setup.layout, stage) for run in chunk]
    each = {
        "gradients": setup.states.gradients,
        "masters": setup.states.masters or setup.states.weights,
        "moments": setup.states.moments,
    }
    counts = parameters_of(setup, runs)
    return {name: _share(setup, *counts, size) for name, size in each.items()}


def _share(setup: Setup, dense: float, experts: float, each: float) -> float:
    """Bytes of the part that one of the data ranks has."""
    return (dense / setup.shards + experts / setup.expert_shards) * each


def stage_memory(setup: Setup, stage: int, calibration: Calibration) -> dict[str, float]:
    """Bytes of each line on a rank of this stage. Lines that are 0 are left out."""
    lines = dict(pieces(setup, stage))
    lines["activations"] *= in_flight(setup.layout, stage)
    lines["waiting gradients"] *= passes_waiting(setup.layout, stage)
    _keep_the_worst_moment(lines)
    lines["runtime"] = calibration.context_bytes
    lines["reserve"] = calibration.reserve * sum(lines.values())
    return {name: lines[name] for name in FORMULAS if lines.get(name)}


def fullest_stage(setup: Setup, calibration: Calibration) -> tuple[int, dict[str, float]]:
    """The stage whose ranks hold most, and its lines. Of stages alike, the first or the last holds most."""
    found = [
        (stage, stage_memory(setup, stage, calibration))
        for group in alike(setup.shape, setup.layout)
        for stage in {group[0], group[-1]}
    ]
    return max(found, key=lambda one: (sum(one[1].values()), -one[0]))


def pieces(setup: Setup, stage: int) -> dict[str, float]:
    """Bytes of each line by itself, with the activations of one pass: they are not all there at once. What
    the calibration says is left out. Not to be changed: stages with the same blocks share it."""
    shape, layout = setup.shape, setup.layout
    others = neighbours(layout, stage)
    chunks = tuple(chunks_of_stage(shape, layout, stage))
    memo, key = shape.memo, ("lines", chunks, others, setup.key, setup.sharding)
    if key in memo:
        found: dict[str, float] = memo[key]
        return found
    runs = [run for chunk in chunks for run in chunk]
    lines = state_lines(setup, *parameters_of(setup, runs))
    kept = sum(number * kept_bytes(shape.parts[index], setup) for index, number in runs)
    lines["activations"] = kept / len(chunks)  # of unequal chunks, their mean
    waits = sum(number * waiting_bytes(shape.parts[index], setup) for index, number in runs)
    lines["waiting gradients"] = waits / len(chunks)
    indices = {index for index, _ in runs}
    if setup.recompute != "none":
        lines["layer computed again"] = max(_again(setup, index) for index in indices)
    lines["working memory"] = max(_working(setup, index) for index in indices)
    heads = [part for part in map(shape.parts.__getitem__, indices) if isinstance(part, Head)]
    lines["logits"] = max((logits_bytes(head, setup) for head in heads), default=0.0)
    largest, tables = _largest(setup, indices)
    if setup.stage_of_zero == 3:
        kept_whole = layout.fsdp and not layout.reshard  # from the forward pass until the backward pass
        gathered = sum(parameters_of(setup, runs)) if kept_whole else 2 * largest + tables
        lines["gathered layers"] = gathered * setup.product_bytes
    if setup.stage_of_zero >= 2:
        lines["gradients in flight"] = 2 * largest * setup.states.gradients
    buckets = 2 * layout.bucket_mb * 2**20 if layout.data > 1 and setup.stage_of_zero < 2 else 0.0
    buckets = min(buckets, lines["gradients"])
    lines["communication buffers"] = buckets + others * edge_bytes(setup, runs)
    memo[key] = lines
    return lines


def _keep_the_worst_moment(lines: dict[str, float]) -> None:
    """The loss is computed before any layer's backward pass: of both moments the larger one counts."""
    passes = ("layer computed again", "working memory")
    if lines["logits"] < sum(lines.get(name, 0.0) for name in passes):
        del lines["logits"]
        return
    for name in passes:
        lines.pop(name, None)


def _largest(setup: Setup, indices: Iterable[int]) -> tuple[float, float]:
    """(Parameters of the largest layer on a rank before data ranks divide it, those of tables and heads)."""
    layer = tables = 0
    for index in indices:
        part = setup.shape.parts[index]
        if isinstance(part, Embedding | Head):
            tables += part.on(setup.layout.tensor)
        else:
            layer = max(layer, sum(parameters_of(setup, [(index, 1)])))
    return layer, tables


def _again(setup: Setup, index: int) -> float:
    """What one block keeps while it is computed again, beyond what it keeps otherwise."""
    part = setup.shape.parts[index]
    if not isinstance(part, LayerGroup):
        return 0.0
    return max(0.0, kept_bytes(part, setup.without_recompute) - kept_bytes(part, setup))


def _working(setup: Setup, index: int) -> float:
    """What a block's backward pass makes and gives up: gradients of its widest tensor, on both sides of what
    made it, and of the stream."""
    part, e = setup.shape.parts[index], setup.product_bytes
    n = setup.positions(part.stream)
    if isinstance(part, LayerGroup):
        ffn = part.active_ffn * (2 if part.gated else 1)
        split = 1 if part.experts and not setup.split_experts else setup.layout.tensor
        widest = max(ffn / split, (part.query_width + 2 * part.kv_width) / setup.layout.tensor)
        return n * (2 * widest * e + 2 * part.width * setup.stream_bytes)
    if isinstance(part, Embedding | Head):
        return 0.0
    return 3.0 * n * part.width * e


def total(lines: Mapping[str, float]) -> float:
    """Of all lines."""
    return sum(lines.values())
