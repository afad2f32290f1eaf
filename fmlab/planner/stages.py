"""Where a pipeline cuts a model, what each stage then holds, and how many micro-batches it holds at once.

Layers are shared out as fmlab.parallel.pipeline does for stage_cuts="even": chunk i of c begins with layer
i * L // c; what stands before the first layer goes to the first chunk, and what follows a layer goes with it.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, takewhile

from fmlab.parallel import Layout
from fmlab.parallel.pipeline.stages import share_work
from fmlab.planner.modelshape import ModelShape
from fmlab.planner.parts import Convolution, Embedding, Head, LayerGroup, Part, Residual
from fmlab.planner.setup import Setup
from fmlab.sim.schedule import model_chunk

#: (index of a part, how many of its blocks)
Run = tuple[int, int]
Chunk = tuple[Run, ...]


# region cut
def cut(shape: ModelShape, chunks: int) -> tuple[Chunk, ...]:
    """The parts of each chunk of the model. Raises ValueError for more chunks than there are layers."""
    key = ("cut", chunks)
    if key in shape.memo:
        found: tuple[Chunk, ...] = shape.memo[key]
        return found
    if chunks > shape.num_layers:
        raise ValueError(
            f"{chunks} chunks (pipeline x virtual_stages) for the {shape.num_layers} layers of {shape.name}; "
            f"legal are 1 to {shape.num_layers}"
        )
    starts = [i * shape.num_layers // chunks for i in range(chunks)]
    lists: list[list[Run]] = [[] for _ in range(chunks)]
    layer, at = 0, 0
    for index, part in enumerate(shape.parts):
        left = part.count
        while left:
            if not part.starts:
                lists[at].append((index, left))
                break
            while at + 1 < chunks and layer >= starts[at + 1]:
                at += 1
            end = starts[at + 1] if at + 1 < chunks else shape.num_layers
            number = min(left, end - layer)
            lists[at].append((index, number))
            left, layer = left - number, layer + number
    result = tuple(tuple(one) for one in lists)
    shape.memo[key] = result
    return result


# endregion


def cut_at(shape: ModelShape, begins: tuple[int, ...]) -> tuple[Chunk, ...]:
    """The parts of each chunk where all but the first begin at the given blocks. Raises ValueError for blocks
    that are not in order, or that the model has not."""
    key = ("cut at", begins)
    if key not in shape.memo:
        blocks = [index for index, part in enumerate(shape.parts) for _ in range(part.count)]
        edges = (0, *begins, len(blocks))
        if any(after <= before for before, after in pairwise(edges)):
            raise ValueError(
                f"stage_cuts={begins}: the {len(blocks)} blocks of {shape.name} are cut at numbers from 1 to "
                f"{len(blocks) - 1}, each higher than the one before"
            )
        shape.memo[key] = tuple(tuple(Counter(blocks[first:end]).items()) for first, end in pairwise(edges))
    found: tuple[Chunk, ...] = shape.memo[key]
    return found


def weighted_cuts(shape: ModelShape, chunks: int) -> tuple[int, ...]:
    """The blocks that all chunks but the first begin with, so that the one with the most work has as little
    as can be: stage_cuts="weighted" of fmlab.parallel.pipeline, which counts elements of matrices.

    Raises ValueError for models whose work is not the same for every position of one stream, and for more
    chunks than blocks.
    """
    key = ("weighted", chunks)
    if key not in shape.memo:
        pictures = any(stream.fixed for stream in shape.streams)
        if pictures or any(isinstance(part, Residual | Convolution) for part in shape.parts):
            raise ValueError(
                f"stage_cuts='weighted': {shape.name} has pictures, whose blocks are not weighed here; leave "
                "it out, or name the blocks that chunks begin with"
            )
        parts = [part for part in shape.parts for _ in range(part.count)]
        heads = sum(1 for _ in takewhile(lambda part: isinstance(part, Head), reversed(parts)))
        last = len(parts) - max(heads, 1)  # heads at the end stay together
        if chunks > last + 1:
            raise ValueError(
                f"{chunks} chunks (pipeline x virtual_stages) for {shape.name}; legal are 1 to {last + 1}"
            )
        shape.memo[key] = tuple(share_work([_work(part) for part in parts], range(1, last + 1), chunks))
    found: tuple[int, ...] = shape.memo[key]
    return found


def _work(part: Part) -> int:
    """Elements of a block's matrices, idle experts too."""
    if isinstance(part, LayerGroup):
        routed = max(part.experts, 1) * part.expert_matrices
        shared = part.branches * part.width * part.shared_ffn if part.experts else 0
        own = part.attention_matrices + part.memory_matrices + part.router
        return own + routed + shared + part.other_matrices + part.row_matrices
    return part.matrices + part.row_matrices


def chunks_of_stage(shape: ModelShape, layout: Layout, stage: int) -> list[Chunk]:
    """The chunks that a stage holds, in its own order."""
    if layout.virtual_stages == 1 and layout.stage_cuts == "even":
        return [cut(shape, layout.pipeline)[stage]]
    cuts = layout.stage_cuts
    if cuts == "weighted":
        cuts = weighted_cuts(shape, layout.pipeline * layout.virtual_stages)
    if isinstance(cuts, tuple):
        chunks = cut_at(shape, cuts)
    else:
        chunks = cut(shape, layout.pipeline * layout.virtual_stages)
    numbers = (
        model_chunk(layout.schedule, stage, chunk, layout.pipeline) for chunk in range(layout.virtual_stages)
    )
    return [chunks[number] for number in numbers]


def alike(shape: ModelShape, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The stages in groups with the same blocks and as many neighbours, which all take the same
    time."""
    key = ("alike", layout.pipeline, layout.virtual_stages, layout.schedule == "zbv", layout.stage_cuts)
    if key not in shape.memo:
        groups: dict[object, list[int]] = {}
        for stage in range(layout.pipeline):
            place = (tuple(chunks_of_stage(shape, layout, stage)), neighbours(layout, stage))
            groups.setdefault(place, []).append(stage)
        shape.memo[key] = tuple(map(tuple, groups.values()))
    found: tuple[tuple[int, ...], ...] = shape.memo[key]
    return found


def neighbours(layout: Layout, stage: int) -> int:
    """Other stages that a stage talks with."""
    if layout.pipeline > 1 and layout.schedule == "interleaved":
        return 2  # its last chunk sends to the first stage
    return (stage > 0) + (stage < layout.pipeline - 1)


def parts_of_stage(shape: ModelShape, layout: Layout, stage: int) -> list[Run]:
    """All of a stage's parts."""
    return [run for chunk in chunks_of_stage(shape, layout, stage) for run in chunk]


# region in flight
def in_flight(layout: Layout, stage: int) -> int:
    """The most passes (micro-batch, chunk) whose activations a stage holds at once; its schedule's own count
    (fmlab.sim.schedule.most_in_flight) in closed form."""
    return passes_held(layout.schedule, layout.pipeline, layout.micro_batches, layout.virtual_stages, stage)


def passes_held(schedule: str, p: int, m: int, v: int, stage: int) -> int:
    """The same by numbers: p stages, m micro-batches, v chunks a stage."""
    if p == 1:
        return 1
    ahead = p - 1 - stage
    if schedule == "gpipe":
        return m
    if schedule == "1f1b":
        return min(m, ahead + 1)
    if schedule == "zb-h1":  # gradients of weights wait for `stage` micro-batches
        return min(m, p)
    if schedule == "interleaved":
        return min(m * v, 2 * ahead + (v - 1) * p + 1)
    return min(2 * m, 2 * p, m + stage + 1)  # zbv


# endregion


def passes_waiting(layout: Layout, stage: int) -> int:
    """The most passes whose gradients of weights are still to be made, once those of their inputs are; of
    schedules that make both at once, none. For "zbv" with few micro-batches it may be fewer."""
    if layout.schedule == "zb-h1":
        return min(layout.micro_batches, stage + 1)
    return min(2 * stage + 1, in_flight(layout, stage)) if layout.schedule == "zbv" else 0


def edge_bytes(setup: Setup, runs: Sequence[Run]) -> float:
    """What a stage is given by the one before for a micro-batch: the stream, and a stream of another part of
    the model that its layers look at (T5's encoder); of a UNet the time, and the skips still to be used."""
    parts = setup.shape.parts
    first = parts[runs[0][0]]
    found = setup.between(first.stream) * first.width
    made = {part.stream: part.width for part in setup.shape.layers}
    looked = {
        p.cross_stream for p in map(parts.__getitem__, (i for i, _ in runs)) if isinstance(p, LayerGroup)
    }
    found += sum(setup.between(name) * made[name] for name in looked - {first.stream} if name in made)
    before, behind = parts[: runs[0][0]], parts[runs[0][0] :]
    times = [part.time_width for part in behind if isinstance(part, Residual)]
    found += setup.rows * max(times, default=0) if before else 0
    found += sum(setup.between(name) * width for name, width in _skips(before))
    return float(found * setup.stream_bytes)


def _skips(parts: Sequence[Part]) -> list[tuple[str, int]]:
    """(stream, channels) of what these parts of a UNet leave to those behind; the last is taken first."""
    found: list[tuple[str, int]] = []
    for part in parts:
        if isinstance(part, Residual) and part.takes:
            found.pop()
        if isinstance(part, Residual | Convolution) and part.leaves:
            found.append((part.stream, part.width))
    return found


def parameters_of(setup: Setup, runs: Sequence[Run]) -> tuple[int, int]:
    """Parameters of a stage on one rank: (all but routed experts, routed experts).

    A tied table counts once a stage: the stage that only borrows it holds a copy of its own.
    """
    shape, layout = setup.shape, setup.layout
    dense = experts = 0
    has_table = False
    for index, number in runs:
        part = shape.parts[index]
        if isinstance(part, Head):
            dense += part.on(layout.tensor, own_table=part.tied and not has_table)
            has_table = has_table or part.tied
        elif isinstance(part, Embedding):
            borrowed = part.shared and not has_table
            dense += part.on(layout.tensor)
            dense += -(-part.tokens // layout.tensor) * part.width if borrowed else 0
            has_table = has_table or part.tokens > 0
        elif isinstance(part, LayerGroup):
            dense += number * part.dense_on(layout.tensor)
            ranks = layout.tensor if setup.split_experts else 1
            experts += number * part.experts_on(ranks, layout.expert)
        else:
            dense += number * part.on(layout.tensor)
    return dense, experts
