"""Bytes that a rank keeps of one micro-batch for the backward pass: of a layer, a convolution, a head.

Two counts stand side by side:

- `kept`: our own blocks, tensor by tensor. A plain layer is fmlab.parallel.activations, which is held to what
  a meter sees; here are the terms of what it has not: a second stream, experts, convolutions, tables, heads.
- `published`: Korthikanti et al. 2022, arXiv:2205.05198, section 4 and table 2, for any width of the network
  and any number of key/value heads (Megatron-LM's theoretical_memory_usage has it for 4h): with n positions,
  10 n h bytes outside of the matrices (divided under sequence parallelism), and inside 2 bytes for each
  query, key, value, output of attention and unit of the network, divided among tensor ranks; 5 a s^2 for the
  scores, unless attention is fused or computed again.

Shapes: n positions, h width, a heads, s positions of a row, e bytes of a number.
"""

from fmlab.parallel.activations import LayerShape, Run
from fmlab.parallel.activations import kept as layer_kept
from fmlab.planner.parts import Convolution, Embedding, Head, LayerGroup, Part, Residual
from fmlab.planner.setup import Setup

CHUNK = 128 * 2**20  # bytes of probabilities that fmlab.models.cross_entropy holds at once


def kept_bytes(part: Part, setup: Setup) -> float:
    """Of one of the part's `count` blocks, by the count that the setup names."""
    memo, key = setup.shape.memo, ("kept", part, setup.key)
    if key not in memo:
        if isinstance(part, LayerGroup):
            by_formula = setup.activations == "megatron"
            memo[key] = published(part, setup) if by_formula else float(sum(kept(part, setup).values()))
        else:
            memo[key] = _kept_elsewhere(part, setup)
    found: float = memo[key]
    return found


# region kept
def kept(group: LayerGroup, setup: Setup) -> dict[str, float]:
    """Bytes that a rank keeps of one of our layers, by what they are."""
    n, stream = setup.positions(group.stream), setup.between(group.stream)
    e, width = setup.product_bytes, group.width
    if setup.recompute == "full":
        return {"what goes into the layer": stream * width * setup.stream_bytes}
    found: dict[str, float] = dict(layer_kept(_plain(group, setup), _run(group, setup)))
    scores = setup.attention == "unfused" or group.score_bias
    if scores and not setup.dropout and setup.recompute == "none":  # once, not on both sides of dropout
        length = setup.lengths[group.stream]
        found["inside attention"] -= setup.rows * _heads(group, setup) * length**2 * e + length**2
    if not group.activation_kept:
        found["inside the feed-forward network"] *= 2 / 3 if group.gated else 0
    if group.cross_width:
        found["the look at the other stream"] = _cross(group, setup)
    if group.experts:
        pairs = n * group.experts_per_token
        found["what experts are given, and give"] = 3 * pairs * width * e
        found["routing"] = n * (2 * group.experts + 3) * 4 + pairs * 36
    if group.other_matrices:
        each = group.other_matrices // width**2 + 1  # what they are given, and what the norm before them is
        found["further matrices"] = each * n * width * e
    return found


# endregion


def _plain(group: LayerGroup, setup: Setup) -> LayerShape:
    """The layer as fmlab.parallel.activations knows it; a mixture as a token's experts side by side."""
    whole = group.experts and not setup.split_experts  # each tensor rank has whole experts
    active = group.experts_per_token * group.ffn * (setup.layout.tensor if whole else 1) + group.shared_ffn
    return LayerShape(
        width=group.width,
        heads=group.heads,
        kv_heads=group.kv_heads,
        head_width=group.head_width,
        ffn=active if group.experts else group.ffn,
        separate_qkv=group.rotary,
        gated=group.gated,
        statistics=1 if group.norm == "rms" else 2,
    )


def _run(group: LayerGroup, setup: Setup) -> Run:
    layout = setup.layout
    return Run(
        setup.rows,
        -(-setup.lengths[group.stream] // layout.context),
        stream=setup.stream_bytes,
        product=setup.product_bytes,
        dropout=setup.dropout,
        tables=setup.attention == "unfused" or group.score_bias,
        tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        recompute=setup.recompute,
    )


def _heads(group: LayerGroup, setup: Setup) -> int:
    return group.heads // setup.layout.tensor


def _cross(group: LayerGroup, setup: Setup) -> float:
    """A norm, its result, queries and what comes of them, keys and values of the other stream's positions."""
    n, stream, e = setup.positions(group.stream), setup.between(group.stream), setup.product_bytes
    memory, heads = setup.positions(group.cross_stream), _heads(group, setup)
    inner = heads * group.head_width
    norm = stream * (group.width + (1 if group.norm == "rms" else 2)) * setup.stream_bytes
    given = stream * group.width + n * 2 * inner + 2 * memory * inner
    return norm + given * e + n * heads * max(4, e)


def _kept_elsewhere(part: Part, setup: Setup) -> float:
    """Of what is no layer."""
    n, e = setup.positions(part.stream), setup.product_bytes
    if isinstance(part, Residual):  # what the norms, the activations and the convolutions are given
        return float(n * 3 * (part.inputs + part.outputs) * e)
    if isinstance(part, Convolution):
        return float(n * part.stride**2 * part.inputs * e)
    stream = setup.between(part.stream)
    norm = 0.0 if part.norm == "none" else stream * (part.width + (1 if part.norm == "rms" else 2))
    if isinstance(part, Embedding):
        return n * 16 + norm * setup.stream_bytes + n * part.patch * e
    assert isinstance(part, Head)
    if part.per_row:
        return float(setup.rows * part.width * e * 2)
    dense = 3 * part.width if part.dense else 0  # what the matrix is given, the activation and its result
    read = part.reads * n
    # our loss makes its gradients in the forward pass: of what the output matrix is given, and of the matrix,
    # which waits for the backward pass
    ours = part.outputs > 0 and setup.logits == "chunked" and setup.activations == "fmlab"
    matrix = -(-part.outputs // setup.layout.tensor) * part.width * setup.states.weights if ours else 0.0
    return norm * setup.stream_bytes + read * (dense + (part.width if part.outputs else 0)) * e + matrix


def logits_bytes(head: Head, setup: Setup) -> float:
    """Of the logits of one micro-batch on a tensor rank while the loss is computed, and of their softmax.

    "chunked": the most that fmlab.models.cross_entropy has at once, in fp32, beside it what these rows are
    given and its gradient. "full": all in the
    products' type and once more in fp32, where the gradient takes the place of the probabilities
    (Korthikanti et al. 2022, section 4.3, counts the fp32 part: 4 s b V / t).
    """
    if not head.outputs or head.per_row:
        return 0.0
    rows = head.reads * setup.positions(head.stream)
    vocabulary = -(-head.outputs // setup.layout.tensor)
    if setup.logits == "chunked":
        given = head.width * setup.product_bytes  # of a row; of those at once, a copy and its gradient too
        at_once = min(rows, max(1, CHUNK // (vocabulary * 4)))
        return float(rows * given + at_once * (vocabulary * 4 + given + head.width * 4))
    return rows * vocabulary * (4 + (setup.product_bytes if setup.product_bytes < 4 else 0))


def waiting_bytes(part: Part, setup: Setup) -> float:
    """Of one block and micro-batch: gradients of what its matrices and norms gave, which a schedule that
    makes the gradients of weights later (zero bubble) holds until then."""
    n, e, tensor = setup.positions(part.stream), setup.product_bytes, setup.layout.tensor
    if isinstance(part, LayerGroup):
        split = 1 if part.experts and not setup.split_experts else tensor
        inner = (part.query_width + 2 * part.kv_width) / tensor
        inner += (part.branches - 1) * part.active_ffn / split
        if part.cross_width:
            inner += part.query_width / tensor
        streams = (2 + (part.cross_width > 0) + part.norms) * setup.between(part.stream) * part.width
        memory = setup.positions(part.cross_stream) * 2 * part.kv_width / tensor if part.cross_width else 0
        return (n * inner + streams + memory) * e
    if isinstance(part, Residual):
        return n * (part.inputs + 3 * part.outputs) * e
    return float(n * part.width * e) if isinstance(part, Convolution) else 0.0


# region published
def published(group: LayerGroup, setup: Setup) -> float:
    """Bytes of a layer in 16 bits, by Korthikanti et al., for any widths: sbh(34 + 5as/h) for a GPT's."""
    n, tensor = setup.positions(group.stream), setup.layout.tensor
    outside = 10.0 * setup.between(group.stream) * group.width
    if setup.recompute == "full":
        return 2.0 * setup.between(group.stream) * group.width
    inner = 2 * group.query_width + 2 * group.kv_width
    whole = tensor if group.experts and not setup.split_experts else 1  # experts that no tensor rank divides
    ffn = (group.active_ffn - group.shared_ffn) * whole + group.shared_ffn
    inside = 2 * n * (inner + ffn * (3 if group.gated else 2)) / tensor
    if group.cross_width:
        outside *= 1.5
        inside += (
            2
            * (n * 2 * group.query_width + 2 * setup.positions(group.cross_stream) * group.kv_width)
            / tensor
        )
    tables = 0.0
    if setup.attention == "unfused" and setup.recompute != "selective":
        keys = setup.lengths[group.stream]
        tables = 5.0 * n * group.heads * keys / tensor
    return outside + inside + tables


# endregion
