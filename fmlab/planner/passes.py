"""Seconds of one micro-batch through one block of a rank: what is computed, moved and sent, forward and back.

Each block takes

    products   its matrices, by fmlab.planner.hardware.Hardware.product; twice as much backward
    attention  4 FLOPs a pair of positions and unit of a head. Fused: only pairs that a position may see, and
               2.5 times as much backward, which computes the scores anew (Dao et al. 2022, arXiv:2205.14135).
               Unfused: all pairs, twice as much backward, and the scores come and go through memory
    memory     passes over tensors: norms, additions, activation functions, rotations, softmax of the logits
    launches   what the host takes to start its kernels; counted by who adds blocks up, where it is more
    messages   of the tensor, context and expert ranks, see the functions below

in seconds. All are sums over the ranks' own shares; nothing waits for another stage here.
"""

from typing import NamedTuple

from fmlab.planner.hardware import Hardware
from fmlab.planner.parts import Convolution, Embedding, Head, LayerGroup, Part, Residual
from fmlab.planner.setup import Setup

FUSED_BACKWARD = 2.5  # five products of pairs instead of two
SCORE_BYTES = 8.0  # a score is written and read by the softmax and by both products
QUANTISED_BYTES = 4.0  # read in 16 bits, and written in 8 as it is and transposed
DROPPED_BYTES = 5.0  # and once more by dropout, with its mask


class Pass(NamedTuple):
    """Seconds of one micro-batch in one direction."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def computed(self) -> float:
        """Without messages and launches."""
        return self.products + self.attention + self.memory

    @property
    def seconds(self) -> float:
        return self.computed + self.tensor + self.context + self.expert

    def plus(self, other: "Pass", times: float = 1.0) -> "Pass":
        return Pass(*(a + times * b for a, b in zip(self, other, strict=True)))


def passes_of(part: Part, setup: Setup, machine: Hardware) -> tuple[Pass, Pass, Pass]:
    """(forward, backward, computed again for the backward pass) of one block."""
    memo, key = setup.shape.memo, ("passes", part, setup.key, machine.key)
    if key not in memo:
        if isinstance(part, LayerGroup):
            forward, backward = _layer(part, setup, machine)
        elif isinstance(part, Head):
            forward, backward = _head(part, setup, machine)
        else:
            forward, backward = _other(part, setup, machine)
        again = Pass()
        if setup.recompute == "full" and not isinstance(part, Embedding | Head):
            again = forward
        elif setup.recompute == "selective" and (
            setup.attention == "unfused" or setup.activations == "megatron"
        ):
            again = Pass(attention=forward.attention)  # of a fused kernel ours computes nothing again
        memo[key] = (forward, backward, again)
    found: tuple[Pass, Pass, Pass] = memo[key]
    return found


def _sixteen(precision: str) -> str:
    """Of what stays in 16 bits when layers are computed in fewer: attention, routers, the output matrix."""
    return "bf16" if precision in ("fp8", "fp4") else precision


# region layer
def _layer(group: LayerGroup, setup: Setup, machine: Hardware) -> tuple[Pass, Pass]:
    n, stream = float(setup.positions(group.stream)), float(setup.between(group.stream))
    products = _attention_products(group, setup, machine, n) + _ffn_products(group, setup, machine, n)
    forward, backward = _attention(group, setup, machine)
    moved = machine.calibration.passes * _moved(group, setup, n, stream) / machine.bandwidth
    launch = machine.calibration.launch if machine.eager else 0.0
    sent = _tensor_messages(group, setup, machine)
    around, expert = _context_messages(group, setup, machine), _expert_messages(group, setup, machine)
    return (
        Pass(products, forward, moved, launch, sent, around, expert),
        Pass(2 * products, backward, 2 * moved, 2 * launch, sent, 2 * around, expert),
    )


# endregion


def _attention_products(group: LayerGroup, setup: Setup, machine: Hardware, n: float) -> float:
    tensor, width, precision = setup.layout.tensor, group.width, setup.precision
    query = group.query_width / tensor
    kv = group.kv_heads_on(tensor) * group.head_width
    found = machine.product(n, width, query + 2 * kv, precision) + machine.product(n, query, width, precision)
    if group.cross_width:
        memory = setup.positions(group.cross_stream)
        found += machine.product(n, width, query, precision) + machine.product(n, query, width, precision)
        found += machine.product(memory, group.cross_width, 2 * kv, precision)
    if group.other_matrices:
        found += machine.product(n, width, group.other_matrices / width, precision)
    if group.row_matrices:
        found += machine.product(setup.rows, width, group.row_matrices / width, precision)
    return found


def _ffn_products(group: LayerGroup, setup: Setup, machine: Hardware, n: float) -> float:
    """Of the feed-forward network, or of all experts that this rank computes, each with its rows."""
    tensor, width, precision = setup.layout.tensor, group.width, setup.precision
    into = group.branches - 1

    def network(rows: float, ffn: float) -> float:
        up = machine.product(rows, width, into * ffn, precision)
        return up + machine.product(rows, ffn, width, precision)

    if not group.experts:
        return network(n, group.ffn / tensor)
    own = group.experts / setup.layout.expert
    found = own * network(
        n * group.experts_per_token / own, group.ffn / (tensor if setup.split_experts else 1)
    )
    found += machine.product(n, width, group.experts, _sixteen(precision))
    return found + (network(n, group.shared_ffn / tensor) if group.shared_ffn else 0.0)


def _attention(group: LayerGroup, setup: Setup, machine: Hardware) -> tuple[float, float]:
    """(forward, backward) seconds of the products of pairs, and of the scores' way through memory."""
    s = setup.lengths[group.stream]
    keys = min(group.window, s) if group.window else s
    skips = setup.attention == "fused" and not group.score_bias and group.causal
    own = s * keys - (keys * keys / 2.0 if skips else 0.0)
    seen = own + (s * setup.lengths[group.cross_stream] if group.cross_width else 0)
    units = group.query_width / setup.layout.tensor
    flops = 4.0 * setup.rows * seen * units / setup.layout.context
    if skips and setup.layout.context > 1 and setup.layout.context_balance == "none":
        flops *= 2 - 1 / setup.layout.context  # the last rank's positions see most
    rate = machine.rate(_sixteen(setup.precision))
    if setup.attention == "fused" and not group.score_bias:
        forward = flops / (rate * machine.calibration.attention_share(machine.chip))
        return forward, FUSED_BACKWARD * forward
    narrow = group.head_width / (group.head_width + machine.calibration.width_half)
    moved = _score_passes(group, setup) * (SCORE_BYTES + setup.dropout * DROPPED_BYTES) / machine.bandwidth
    forward = flops / (rate * narrow) + moved
    return forward, 2 * flops / (rate * narrow) + 2 * moved


def _score_passes(group: LayerGroup, setup: Setup) -> float:
    """Scores of a rank."""
    s, heads = setup.lengths[group.stream], group.heads / setup.layout.tensor
    return setup.rows * heads * s * s / setup.layout.context


def _moved(group: LayerGroup, setup: Setup, n: float, stream: float) -> float:
    """Bytes of passes over tensors, forward: a norm reads and writes, an addition reads two and writes one,
    an activation function reads its branches and writes one, a rotation reads and writes."""
    e, wide, tensor = setup.product_bytes, setup.stream_bytes, setup.layout.tensor
    halves = 3 if group.cross_width else 2
    found = halves * stream * group.width * (wide + e + 3 * wide + setup.dropout * (2 * wide + 1))
    split = tensor if not group.experts or setup.split_experts else 1
    found += n * group.active_ffn / split * group.branches * e
    if setup.precision in ("fp8", "fp4"):  # what enters each product is cast
        inputs = 2 * group.width + group.query_width / tensor + group.active_ffn / split
        found += n * inputs * QUANTISED_BYTES
    if group.rotary:
        found += 2 * n * (group.query_width + group.kv_width) / tensor * e
    if group.experts:  # sorted by expert, and back
        found += 4 * n * group.experts_per_token * group.width * e
    return found


# ---- messages ----------------------------------------------------------------------------------------------


def _tensor_messages(group: LayerGroup, setup: Setup, machine: Hardware) -> float:
    """Of one direction: an all-reduce of the stream for each half of the layer, or the gather and the
    reduce-scatter that it consists of (fmlab.parallel.tensor.cost)."""
    tensor = setup.layout.tensor
    if tensor == 1:
        return 0.0
    wires = machine.need_wires(setup.layout.world_size)
    ranks = wires.group(tensor, setup.stride("tensor"))
    payload = setup.positions(group.stream) * group.width * setup.product_bytes
    halves = 3 if group.cross_width else 2
    if group.experts and not setup.split_experts:
        halves -= 1  # each tensor rank has whole experts, whose results need no sum
    one = machine.calibration
    if setup.layout.sequence_parallel:
        both = wires.seconds("all_gather", payload, ranks, one) + wires.seconds(
            "reduce_scatter", payload, ranks, one
        )
    else:
        both = wires.seconds("all_reduce", payload, ranks, one)
    return halves * both * (1 - one.hidden_tensor)


def _context_messages(group: LayerGroup, setup: Setup, machine: Hardware) -> float:
    """Forward: keys and values round the ring, or heads for positions (fmlab.parallel.context.cost)."""
    context = setup.layout.context
    if context == 1:
        return 0.0
    wires = machine.need_wires(setup.layout.world_size)
    stride, n, e = setup.stride("context"), setup.positions(group.stream), setup.product_bytes
    kv = group.kv_heads_on(setup.layout.tensor) * group.head_width
    if setup.layout.context_method == "ring":
        seconds = (context - 1) * wires.send(n * 2 * kv * e, stride, context, machine.calibration)
    else:
        inner = group.query_width / setup.layout.tensor
        ranks = wires.group(context, stride)
        seconds = 2 * wires.seconds("all_to_all", n * (inner + kv) * e, ranks, machine.calibration)
    return seconds * (1 - machine.calibration.hidden_context)


def _expert_messages(group: LayerGroup, setup: Setup, machine: Hardware) -> float:
    """Of one direction: each pair of token and choice travels to its expert and back."""
    expert = setup.layout.expert
    if expert == 1 or not group.experts:
        return 0.0
    wires = machine.need_wires(setup.layout.world_size)
    ranks = wires.group(expert, setup.stride("data"))
    payload = setup.positions(group.stream) * group.experts_per_token * group.width * setup.product_bytes
    seconds = 2 * wires.seconds("all_to_all", payload, ranks, machine.calibration)
    return seconds * (1 - machine.calibration.hidden_expert)


# ---- what is no layer --------------------------------------------------------------------------------------


def _head(head: Head, setup: Setup, machine: Hardware) -> tuple[Pass, Pass]:
    rows = float(setup.rows) if head.per_row else head.reads * setup.positions(head.stream)
    precision = _sixteen(setup.precision)
    products = memory = 0.0
    if head.dense:
        products += machine.product(rows, head.width, head.dense / head.width, precision)
    if head.outputs:
        outputs = head.outputs / (1 if head.per_row else setup.layout.tensor)
        products += machine.product(rows, head.width, outputs, precision)
        memory = rows * outputs * 8.0 / machine.bandwidth  # written, and read by the softmax, in fp32
    stream = 0.0 if head.norm == "none" else setup.between(head.stream) * head.width * 2 * setup.stream_bytes
    memory += stream / machine.bandwidth
    sent = _stream_message(head, setup, machine) if head.outputs and not head.per_row else 0.0
    return Pass(products, 0.0, memory), Pass(2 * products, 0.0, memory, tensor=sent)


def _other(part: Part, setup: Setup, machine: Hardware) -> tuple[Pass, Pass]:
    """Embeddings and convolutions."""
    n, e = float(setup.positions(part.stream)), setup.product_bytes
    launch = machine.calibration.launch / 4 if machine.eager else 0.0
    if isinstance(part, Embedding):
        products = machine.product(n, part.patch, part.width, setup.precision) if part.patch else 0.0
        memory = 3 * n * part.width * setup.stream_bytes / machine.bandwidth
        sent = _stream_message(part, setup, machine) if part.tokens else 0.0
        return Pass(products, 0.0, memory, launch, sent), Pass(2 * products, 0.0, memory, launch)
    assert isinstance(part, Residual | Convolution)
    sent = returned = 0.0
    if isinstance(part, Residual):
        split = setup.layout.tensor
        products = machine.product(n, 9 * part.inputs, part.outputs / split, setup.precision)
        products += machine.product(n, 9 * part.outputs / split, part.outputs, setup.precision)
        if part.shortcut:
            products += machine.product(n, part.inputs, part.outputs, setup.precision)
        memory = 4 * n * (part.inputs + part.outputs) * e / machine.bandwidth
        sent, returned = _residual_messages(part, setup, machine)
    else:
        products = machine.product(n, part.kernel**2 * part.inputs, part.outputs, setup.precision)
        memory = n * part.outputs * e / machine.bandwidth
    backward = Pass(2 * products, 0.0, 2 * memory, 2 * launch, returned)
    return Pass(products, 0.0, memory, launch, sent), backward


def _residual_messages(part: Residual, setup: Setup, machine: Hardware) -> tuple[float, float]:
    """Forward an all-reduce of what the block makes, backward of the gradients of what it is given."""
    if setup.layout.tensor == 1:
        return 0.0, 0.0
    wires, n = machine.need_wires(setup.layout.world_size), setup.positions(part.stream)
    ranks = wires.group(setup.layout.tensor, setup.stride("tensor"))

    def seconds(numbers: int) -> float:
        found = wires.seconds("all_reduce", numbers * setup.product_bytes, ranks, machine.calibration)
        return found * (1 - machine.calibration.hidden_tensor)

    return seconds(n * part.outputs), seconds(n * part.inputs) + seconds(setup.rows * part.time_width)


def _stream_message(part: Head | Embedding, setup: Setup, machine: Hardware) -> float:
    """An all-reduce of the stream: of looked-up vectors forward, of a divided output matrix backward."""
    tensor = setup.layout.tensor
    if tensor == 1:
        return 0.0
    wires = machine.need_wires(setup.layout.world_size)
    ranks = wires.group(tensor, setup.stride("tensor"))
    payload = setup.positions(part.stream) * part.width * setup.product_bytes
    return wires.seconds("all_reduce", payload, ranks, machine.calibration)
