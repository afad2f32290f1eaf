"""How many FLOPs a training step is, by each convention in use: the same step can be "50 %" or "60 %".

    flops_per_step(model_shape("gpt3-175b"), batch=1536, seq_len=2048).model       matrices, attention, logits
    flops_per_step(..., convention="causal-halved")                                half of a causal attention
    flops_per_step(..., recompute="full").hardware                                 the forward pass again

A multiply and an add are two. Every matrix costs 2 FLOPs an element and position forward and 4 backward; what
is no matrix product (norms, softmax, activations) is left out, unless a convention says otherwise.

Conventions, with h width, s positions, L layers, N parameters, V vocabulary, d a head's widths:

    full-attention   6 N_matmul + 12 L h s a token: every pair of positions counts, causal or not, and so do
                     the logits; look-ups do not (Korthikanti et al. 2022, arXiv:2205.05198, equation 7;
                     torchtitan, nanochat, llm-foundry's shapes)
    causal-halved    the same with half of a causal attention: what a causal kernel executes (Megatron-Core,
                     Megatron-Bridge, MaxText since 2025)
    6nd              6 N a token, all tables in N, no attention (Kaplan et al. 2020, arXiv:2001.08361); of an
                     encoder and a decoder each token meets its own half (3 N D: Brown et al. 2020, Table D.1)
    6n+attention     6 N + 12 L h s: tables in N, and attention too (llm-foundry's MFU)
    korthikanti      full-attention, but selective recomputation counts as equation 8 has it: 72 B L s h^2 x
                     s/6h, three times the one forward pass of attention that is executed
    neuron           forward passes of 2 s V h for the look-up and 3 a s^2 for the softmax as well (AWS's
                     llama_perf_estimate)
    chinchilla       no logits, softmax 3 a s^2 counted (Hoffmann et al. 2022, arXiv:2203.15556, appendix F,
                     as reproduced in nanoGPT's scaling_laws)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fmlab.parallel.values import whole
from fmlab.planner.parts import MOST, Embedding, Head, LayerGroup
from fmlab.planner.shapes import ModelShape

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Flops:
    """FLOPs of one step over all chips, forward and backward together.

    matmul:        matrices of layers, patches, convolutions and heads but the last
    attention:     products of queries and keys, and of weights and values
    logits:        the output matrix
    other:         what only some conventions count: look-ups, softmax
    recomputation: what is computed a second time; no part of `model`
    """

    convention: str
    matmul: float
    attention: float
    logits: float
    other: float
    recomputation: float

    @property
    def model(self) -> float:
        """What the mathematics asks for: for model FLOPs utilisation (MFU)."""
        return self.matmul + self.attention + self.logits + self.other

    @property
    def hardware(self) -> float:
        """With what is computed again: for hardware FLOPs utilisation (HFU)."""
        return self.model + self.recomputation

    def per_chip_second(self, seconds: float, chips: int, hardware: bool = False) -> float:
        """FLOPs a second and chip of a step that took `seconds` on `chips`."""
        if not seconds > 0 or chips < 1:
            raise ValueError(f"seconds={seconds!r}, chips={chips!r}: give a time above 0 and 1 chip or more")
        return (self.hardware if hardware else self.model) / seconds / chips

    def utilisation(self, seconds: float, chips: int, peak: float, hardware: bool = False) -> float:
        """The share of `peak` [FLOP/s of a chip, dense]: MFU, or with `hardware` HFU."""
        return self.per_chip_second(seconds, chips, hardware) / peak


class Forward(NamedTuple):
    """FLOPs of one row's forward pass."""

    matmul: float
    attention: float
    logits: float
    embeddings: float  # if a look-up were a matrix product
    softmax: float  # three operations a score


# region forward
def forward_flops(shape: ModelShape, lengths: Mapping[str, int], causal_halved: bool = False) -> Forward:
    """FLOPs of the forward pass of one row, part by part.

    lengths: of ModelShape.lengths. causal_halved: count half of the pairs where a position sees only those
    before it.
    """
    matmul = attention = logits = embeddings = softmax = 0.0
    for part in shape.parts:
        positions = lengths[part.stream]
        matmul += 2.0 * part.count * part.row_matrices
        if isinstance(part, Head):
            read = 1.0 if part.per_row else part.reads * positions
            matmul += 2.0 * read * part.dense
            logits += 2.0 * read * part.outputs * part.width
            continue
        matrices_see = positions - 1 if isinstance(part, Embedding) and part.class_token else positions
        matmul += 2.0 * part.count * matrices_see * part.matrices
        if isinstance(part, LayerGroup):
            seen = pairs(part, lengths, causal_halved)
            attention += 4.0 * part.count * seen * part.query_width
            softmax += 3.0 * part.count * seen * part.heads
            if part.cross_width:
                matmul += 2.0 * part.count * lengths[part.cross_stream] * part.memory_matrices
        elif isinstance(part, Embedding):
            embeddings += 2.0 * positions * part.tokens * part.width
    return Forward(matmul, attention, logits, embeddings, softmax)


# endregion


def pairs(group: LayerGroup, lengths: Mapping[str, int], causal_halved: bool = False) -> float:
    """Pairs of a query's and a key's position in a row, one layer; a window limits the keys.

    Halved, s positions make s^2 / 2 pairs, as the conventions have it, not s (s + 1) / 2.
    """
    s = lengths[group.stream]
    keys = min(group.window, s) if group.window else s
    own = float(s * keys)
    if causal_halved and group.causal:
        own -= keys * keys / 2.0
    return own + (s * lengths[group.cross_stream] if group.cross_width else 0)


def parameter_products(shape: ModelShape, lengths: Mapping[str, int], tables: bool = True) -> float:
    """N D of one row: each part's parameters times the positions that meet them; active experts only.

    tables: whether those of tokens and positions, and an output matrix, count.
    """
    found = 0.0
    for part in shape.parts:
        number: float = part.parameters
        if isinstance(part, LayerGroup) and part.experts:
            idle = part.experts - part.experts_per_token
            number -= part.count * part.experts_on() / part.experts * idle
        if not tables:
            number -= getattr(part, "tables", 0)
            if isinstance(part, Head) and not part.tied:
                number -= part.outputs * part.width
        once = isinstance(part, Head) and part.per_row
        found += number * (1 if once else lengths[part.stream])
    return found


# ---- conventions -------------------------------------------------------------------------------------------


def _counted(shape: ModelShape, lengths: Mapping[str, int], tables: bool | None) -> Forward:
    one = forward_flops(shape, lengths)
    return one._replace(softmax=0.0, embeddings=one.embeddings if tables else 0.0)


def _halved(shape: ModelShape, lengths: Mapping[str, int], tables: bool | None) -> Forward:
    one = forward_flops(shape, lengths, causal_halved=True)
    return one._replace(softmax=0.0, embeddings=one.embeddings if tables else 0.0)


def _six(shape: ModelShape, lengths: Mapping[str, int], tables: bool | None) -> Forward:
    return Forward(2.0 * parameter_products(shape, lengths, tables is not False), 0.0, 0.0, 0.0, 0.0)


def _six_and_attention(shape: ModelShape, lengths: Mapping[str, int], tables: bool | None) -> Forward:
    return _six(shape, lengths, tables)._replace(attention=forward_flops(shape, lengths).attention)


def _neuron(shape: ModelShape, lengths: Mapping[str, int], tables: bool | None) -> Forward:
    one = forward_flops(shape, lengths)
    return one if tables is not False else one._replace(embeddings=0.0)


def _chinchilla(shape: ModelShape, lengths: Mapping[str, int], tables: bool | None) -> Forward:
    one = forward_flops(shape, lengths)
    return one._replace(logits=0.0, embeddings=one.embeddings if tables else 0.0)


CONVENTIONS: dict[str, Callable[[ModelShape, Mapping[str, int], bool | None], Forward]] = {
    "full-attention": _counted,
    "causal-halved": _halved,
    "6nd": _six,
    "6n+attention": _six_and_attention,
    "korthikanti": _counted,
    "neuron": _neuron,
    "chinchilla": _chinchilla,
}


def check_convention(name: str) -> None:
    """Raise ValueError, with the legal ones, for an unknown convention."""
    if name not in CONVENTIONS:
        raise ValueError(f"FLOP convention {name!r} is unknown; legal are {', '.join(CONVENTIONS)}")


def flops_per_step(
    shape: ModelShape,
    batch: int,
    seq_len: int | Mapping[str, int] | None = None,
    convention: str = "full-attention",
    recompute: str = "none",
    embeddings: bool | None = None,
) -> Flops:
    """FLOPs of a training step on `batch` rows.

    recompute: "none"; "selective": attention's inside once more; "full": all layers once more (not the tables
        and heads). embeddings: whether tables count (in N, or a look-up as if it were a product); None: as
        the convention has it.

    Raises ValueError for an unknown convention or recompute, and for sizes that cannot be.
    """
    check_convention(convention)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: legal are {', '.join(RECOMPUTE)}")
    if whole(batch, f"batch={batch!r}") > MOST:
        raise ValueError(f"batch={batch}: more than {MOST} rows cannot be meant")
    lengths = shape.lengths(seq_len)
    one = CONVENTIONS[convention](shape, lengths, embeddings)
    passes = 3.0 * batch
    if recompute == "full":
        again = batch * sum(_layers_again(shape, lengths, convention))
    elif recompute == "selective":
        again = batch * one.attention * (3.0 if convention == "korthikanti" else 1.0)
    else:
        again = 0.0
    return Flops(
        convention,
        passes * one.matmul,
        passes * one.attention,
        passes * one.logits,
        passes * (one.embeddings + one.softmax),
        again,
    )


def _layers_again(shape: ModelShape, lengths: Mapping[str, int], convention: str) -> Iterator[float]:
    """FLOPs of one row's forward pass through the layers alone."""
    layers = ModelShape(
        shape.name,
        shape.family,
        tuple(part for part in shape.parts[:-1] if not isinstance(part, Embedding | Head)),
        shape.streams,
    )
    yield from CONVENTIONS[convention](layers, lengths, None)
