"""How many bytes a transformer layer keeps for its backward pass: our own blocks, counted from their shapes.

Each term of `kept` is a tensor that autograd saves in fmlab's layers, so that the sum can be held to what
fmlab.meter.saved_activations measures. `classic` is the table of Korthikanti et al. 2022, arXiv:2205.05198,
section 4, for the same layer as Megatron-LM had it. In pure 16 bits with dropout the two agree: sbh(34 +
5as/h) bytes. They differ where

- autocast keeps the stream between layers in fp32: the inputs of the two norms have 4 bytes, not 2, and each
  matrix's 16-bit copy stays for the backward pass;
- attention is fused: no tables, 5as^2b falls away, and one number a query and head is kept;
- the layer is another one: SwiGLU keeps gate, up, silu(gate) and their product; rotated queries and keys are
  tensors of their own; norms keep their statistics;
- the paper counts two streams of 2sbh for the norms and no statistics.

Shapes: b rows, l positions, d hidden width, h query heads, g key/value heads, k head width, f feed-forward
width, t tensor-parallel ranks.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from fmlab.models.layers import MLP, GatedMLP, GroupedAttention, RMSNorm, SelfAttention

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class LayerShape:
    """What decides how much a layer keeps.

    separate_qkv: queries have their own matrix, and what is rotated is not what came out of it
    gated:        the feed-forward network multiplies two branches
    statistics:   numbers that a norm keeps for a position: 2 (mean, deviation) or 1
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    separate_qkv: bool = False
    gated: bool = False
    statistics: int = 2

    @property
    def matrix_elements(self) -> int:
        """Elements of the layer's matrices."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_width
        return self.width * (qkv + self.heads * self.head_width + (3 if self.gated else 2) * self.ffn)


def layer_shape(block: nn.Module) -> LayerShape:
    """The shape of a whole layer of GPT, Llama, BERT and their like (on the meta device, too).

    Raises ValueError for a block that is made of something else.
    """
    attention, mlp = getattr(block, "attention", None), getattr(block, "mlp", None)
    if not isinstance(attention, (SelfAttention, GroupedAttention)) or not isinstance(mlp, (MLP, GatedMLP)):
        raise ValueError(
            f"there is no formula for a {type(block).__name__}: it needs an `attention` (SelfAttention or "
            "GroupedAttention) and an `mlp` (MLP or GatedMLP); measure it with fmlab.meter.saved_activations"
        )
    k, gated = attention.head_size, isinstance(mlp, GatedMLP)
    if isinstance(attention, SelfAttention):
        heads = kv_heads = len(attention.qkv.weight) // (3 * k)
    else:
        heads, kv_heads = len(attention.query.weight) // k, len(attention.key_value.weight) // (2 * k)
    return LayerShape(
        width=attention.output.weight.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_width=k,
        ffn=mlp.down.weight.shape[1],
        separate_qkv=isinstance(attention, GroupedAttention),
        gated=gated,
        statistics=1 if any(isinstance(module, RMSNorm) for module in block.children()) else 2,
    )


@dataclass(frozen=True)
class Run:
    """What runs through a layer, and on how many ranks.

    rows, length: of the micro-batch on this rank (of a context-parallel rank its part)
    stream:       bytes of an element between layers; product: of what enters a matrix. 4 and 4 in fp32, 4 and
                  2 under bf16 autocast, 2 and 2 for a model in bf16
    dropout:      whether there is any (then a mask of a byte an element)
    tables:       whether attention keeps its weights, as it does with dropout or a bias; else it is fused
    """

    rows: int
    length: int
    stream: int = 4
    product: int = 4
    dropout: bool = False
    tables: bool = False
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r}: legal are {', '.join(RECOMPUTE)}")
        for name in ("rows", "length", "stream", "product", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give 1 or more")

    @property
    def positions(self) -> int:
        """Of the whole micro-batch."""
        return self.rows * self.length

    @property
    def stream_positions(self) -> int:
        """That this rank has between the matrices."""
        return self.rows * -(-self.length // self.tensor) if self.sequence_parallel else self.positions


# region kept
def kept(layer: LayerShape, run: Run) -> dict[str, int]:
    """Bytes that a rank keeps of one layer and micro-batch, by what they are. Raises ValueError for heads
    that cannot be divided."""
    stream, n = run.stream_positions, run.positions
    if run.recompute == "full":
        return {"what goes into the layer": stream * layer.width * run.stream}
    cast = run.product != run.stream
    heads, ffn = _divided(layer.heads, run.tensor, "heads"), _divided(layer.ffn, run.tensor, "hidden units")
    inner = heads * layer.head_width
    # Under autocast each matrix casts its input anew; a divided layer casts once for both.
    copies = 2 if layer.separate_qkv and cast and run.tensor == 1 else 1
    found = {
        "what the norms are given": 2 * stream * (layer.width + layer.statistics) * run.stream,
        "what the matrices are given": run.product
        * (stream * layer.width * (copies + 1) + n * (inner + ffn)),
        "inside attention": _attention(layer, run, heads),
        "inside the feed-forward network": n * ffn * run.product * (3 if layer.gated else 1),
    }
    if run.dropout:
        found["dropout masks of the stream"] = 2 * stream * layer.width
    if cast:
        found["16-bit copies of the matrices"] = layer.matrix_elements // run.tensor * run.product
    return found


# endregion


def _attention(layer: LayerShape, run: Run, heads: int) -> int:
    """Bytes of queries, keys, values and what attention makes of them, but for what goes into the next
    matrix."""
    n, e, k = run.positions, run.product, layer.head_width
    kv_heads = max(1, layer.kv_heads // run.tensor)
    tables = run.tables and run.recompute == "none"
    if tables:  # weights before and after dropout, a byte for each mask; keys and values copied to all heads
        pairs = run.rows * heads * run.length**2
        return n * 3 * heads * k * e + pairs * (2 * e + int(run.dropout)) + run.length**2
    # What the core is given: rotated keys are tensors of their own, beside those that the matrix made.
    given = n * (heads + (3 if layer.separate_qkv else 2) * kv_heads) * k * e
    grouped = kv_heads < heads
    # 16-bit attention with few or narrow keys runs in fp32 on CPUs (fmlab.models.attention.core).
    widened = grouped and e == 2 and (run.length <= 128 or k <= 32)
    if run.recompute == "selective" and (run.tables or widened):
        return given
    sums = n * heads * max(4, e)  # the log-sum-exp of each query's scores
    if widened:
        return n * 2 * (heads + kv_heads) * k * 4 + sums
    return given + sums


def total(layer: LayerShape, run: Run, layers: int = 1) -> int:
    """Bytes of so many equal layers. The first one splits the stream where it is divided by positions, so
    what goes into it is whole."""
    found = layers * sum(kept(layer, run).values())
    if run.recompute == "full" and layers:
        found += (run.positions - run.stream_positions) * layer.width * run.stream
    return found


def _divided(number: int, ranks: int, what: str) -> int:
    if number % ranks:
        legal = [n for n in range(1, number + 1) if number % n == 0]
        raise ValueError(f"{number} {what} cannot be divided among {ranks} ranks; legal are {legal}")
    return number // ranks


# region classic
def classic(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Bytes of a layer in 16 bits by Korthikanti et al., table 2: s positions, b rows, h width, a heads, t
    tensor-parallel ranks. Raises ValueError for an unknown recompute."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: legal are {', '.join(RECOMPUTE)}")
    if recompute == "full":
        return 2 * s * b * h / (t if sequence_parallel else 1)
    outside = 34 / t if sequence_parallel else 10 + 24 / t
    tables = 0.0 if recompute == "selective" else 5 * a * s / (h * t)
    return s * b * h * (outside + tables)


# endregion


def selective_share(s: int, h: int) -> float:
    """Operations of attention's two products, which selective recomputation runs again, of those of a layer's
    forward pass: 4bs^2h of 24bsh^2 + 4bs^2h, or s / (6h + s).

    0.027 for 175B and 0.016 for 530B parameters, the figures of Korthikanti et al., section 5; of forward and
    backward pass together it is a third. Ours stops before the second product, which saves nothing: half.
    """
    return s / (6 * h + s)


def run_of(layout: Any, rows: int, length: int, **settings: Any) -> Run:
    """The `Run` of a micro-batch of `rows` under a layout; `settings` are further fields."""
    precision = {"product": 2} if layout.precision == "bf16" else {}
    recompute = "none" if layout.recompute == "budget" else layout.recompute
    return Run(
        rows,
        -(-length // layout.context),
        tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        recompute=recompute,
        **{**precision, **settings},
    )
