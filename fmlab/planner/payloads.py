"""What a rank hands to collectives and sends in a step, in bytes: what the lines of time are priced from.

    payload = payloads(setup, stage)           or Plan.payloads(stage)
    payload["gradient messages"]               {"reduce_scatter": 5.0e9, "all_gather": 5.0e9}

A payload is the whole tensor that is reduced, gathered or scattered, as fmlab.meter.traffic counts it: a
ring of n ranks sends (n - 1) / n of it, twice for an all-reduce. Left out are counts, losses, what a divided
softmax exchanges and the embeddings that a contrastive loss gathers: a few numbers for a token or a step, or
two vectors for a row.
"""

from collections import defaultdict

from fmlab.planner.parts import Embedding, Head, LayerGroup, Residual
from fmlab.planner.setup import Setup
from fmlab.planner.stages import Run, chunks_of_stage, edge_bytes, parameters_of
from fmlab.sim.schedule import model_chunk, place

#: line -> collective -> bytes
Payloads = dict[str, dict[str, float]]


def payloads(setup: Setup, stage: int) -> Payloads:
    """Of a rank of this stage in one step, line by line as in fmlab.planner.time.FORMULAS."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(line: str, collective: str, nbytes: float) -> None:
        if nbytes:
            found[line][collective] += nbytes

    batches, looked_at = setup.layout.micro_batches, set[str]()
    made = {part.stream for part in setup.shape.parts}  # what comes with a batch has no gradient
    chunks = chunks_of_stage(setup.shape, setup.layout, stage)
    for index, number in (run for chunk in chunks for run in chunk):
        part = setup.shape.parts[index]
        for collective, nbytes in _tensor(part, setup, _ends_in_a_sum(setup, index)):
            add("tensor messages", collective, batches * number * nbytes)
        if isinstance(part, LayerGroup):
            if part.cross_stream in made - looked_at and setup.layout.tensor > 1:
                looked_at.add(part.cross_stream)  # its gradient is summed once for all layers
                memory = setup.positions(part.cross_stream) * part.cross_width * setup.product_bytes
                add("tensor messages", "all_reduce", float(batches * memory))
            add("context messages", *_context(part, setup, batches * number))
            add("expert messages", "all_to_all", batches * number * _expert(part, setup))
    add("pipeline messages", "send", batches * _sent(setup, stage))
    if _has_tied_table(setup, stage):
        table = -(-setup.shape.vocab_size // setup.layout.tensor) * setup.shape.width
        add("tied tables", "all_reduce", table * setup.states.gradients)
    for line, collective, nbytes in _data(setup, [run for chunk in chunks for run in chunk]):
        add(line, collective, nbytes)
    return {line: dict(ways) for line, ways in found.items()}


# region tensor
def _tensor(part: object, setup: Setup, last: bool) -> list[tuple[str, float]]:
    """(collective, bytes) of one block and micro-batch, forward and backward. last: see `_ends_in_a_sum`."""
    layout = setup.layout
    if layout.tensor == 1 or not isinstance(part, LayerGroup | Embedding | Head | Residual):
        return []
    if isinstance(part, Residual):  # its result, again where it is recomputed; the gradients of its inputs
        forward = part.outputs * (2 if setup.recompute == "full" and not last else 1)
        numbers = setup.positions(part.stream) * (forward + part.inputs) + setup.rows * part.time_width
        return [("all_reduce", float(numbers * setup.product_bytes))]
    stream = float(setup.positions(part.stream) * part.width * setup.product_bytes)
    if isinstance(part, LayerGroup):
        halves = 3 if part.cross_width else 2
        if part.experts and not setup.split_experts:
            halves -= 1  # whole experts on each tensor rank
        passes = 3 if setup.recompute == "full" else 2
        if layout.sequence_parallel:
            # what the gather made is not kept, and gathered again for the gradient of its matrix
            return [
                ("all_gather", (passes + 1) * halves * stream),
                ("reduce_scatter", passes * halves * stream),
            ]
        return [("all_reduce", passes * halves * stream)]
    if not (part.tokens if isinstance(part, Embedding) else part.outputs and not part.per_row):
        return []
    if not layout.sequence_parallel:
        return [
            ("all_reduce", stream)
        ]  # of looked-up vectors, or of the gradient of what the logits are made of
    return [
        ("all_gather", stream),
        ("reduce_scatter" if isinstance(part, Embedding) else "all_reduce", stream),
    ]


# endregion


def _ends_in_a_sum(setup: Setup, index: int) -> bool:
    """Whether a residual block's sum over ranks is the last that its layer computes: computed again, it stops
    before what nothing is made of. A transformer, or the convolution of a shortcut, comes behind it."""
    part, behind = setup.shape.parts[index], setup.shape.parts[index + 1 : index + 2]
    transformer = any(isinstance(one, LayerGroup) and not one.starts for one in behind)
    return isinstance(part, Residual) and not part.shortcut and not transformer


def _context(group: LayerGroup, setup: Setup, times: int) -> tuple[str, float]:
    """Forward and backward: the ring sends keys and values, then them and their gradients; Ulysses exchanges
    heads for positions, four times forward and four times backward."""
    context = setup.layout.context
    n, e = setup.positions(group.stream), setup.product_bytes
    kv = group.kv_heads_on(setup.layout.tensor) * group.head_width
    if setup.layout.context_method == "ring":
        return "send", times * 3 * (context - 1) * n * 2 * kv * e
    inner = group.query_width / setup.layout.tensor
    return "all_to_all", times * (context > 1) * 4 * n * (inner + kv) * e


def _expert(group: LayerGroup, setup: Setup) -> float:
    """Each pair of token and choice to its expert and back, forward and backward."""
    if setup.layout.expert == 1 or not group.experts:
        return 0.0
    return 4.0 * setup.positions(group.stream) * group.experts_per_token * group.width * setup.product_bytes


def _sent(setup: Setup, stage: int) -> float:
    """To other stages, of one micro-batch: the stream to the next chunk, its gradient to the one before."""
    layout = setup.layout
    if layout.pipeline == 1:
        return 0.0
    found, last = 0.0, layout.pipeline * layout.virtual_stages - 1

    def edge(number: int) -> float:
        there, chunk = place(layout.schedule, number, layout.pipeline)
        return edge_bytes(setup, chunks_of_stage(setup.shape, layout, there)[chunk])

    def elsewhere(number: int) -> bool:
        return 0 <= number <= last and place(layout.schedule, number, layout.pipeline)[0] != stage

    for chunk in range(layout.virtual_stages):
        number = model_chunk(layout.schedule, stage, chunk, layout.pipeline)
        found += edge(number + 1) if elsewhere(number + 1) else 0.0
        found += edge(number) if elsewhere(number - 1) else 0.0
    return found


def _has_tied_table(setup: Setup, stage: int) -> bool:
    """Whether a table stands on this stage and on another one; the ends of "zbv" share a stage."""
    layout = setup.layout
    ends = stage in (0, layout.pipeline - 1)
    return setup.shape.tied and layout.pipeline > 1 and layout.schedule != "zbv" and ends


# region data
def _data(setup: Setup, runs: list[tuple[int, int]]) -> list[tuple[str, str, float]]:
    """(line, collective, bytes) of the data ranks: sums of gradients, and gathers of what is divided."""
    layout, zero = setup.layout, setup.stage_of_zero
    if layout.data * layout.context == 1:
        return []
    dense, experts = parameters_of(setup, runs)
    number = float(dense if layout.expert > 1 and layout.expert == layout.data else dense + experts)
    gradients, line = number * setup.states.gradients, "gradient messages"
    if zero == 0:
        return [(line, "all_reduce", gradients)]
    if zero < 3:
        return [(line, "reduce_scatter", gradients), (line, "all_gather", number * setup.states.weights)]
    batches, gathers = layout.micro_batches, 2 * layout.micro_batches
    # fsdp gathers a table that both ends use once a step, and sums its gradients once
    root = setup.shape.vocab_size * setup.shape.width if layout.fsdp and setup.shape.tied else 0
    passed = gathers * (number - root) + root
    if layout.fsdp:  # the last block's backward pass follows its forward pass: it is kept in between
        passed = passed - batches * _last_block(setup, runs) if layout.reshard else number
    summed = batches * (number - root) + root
    return [
        ("gathered weights", "all_gather", passed * setup.product_bytes),
        ("gathered weights", "reduce_scatter", summed * setup.states.gradients),
    ]


# endregion


def _last_block(setup: Setup, runs: list[Run]) -> int:
    """Parameters of the block that a stage ends with; a tied table is none of its own."""
    index = runs[-1][0]
    last = setup.shape.parts[index]
    return last.on(setup.layout.tensor) if isinstance(last, Head) else sum(parameters_of(setup, [(index, 1)]))
