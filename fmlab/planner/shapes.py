"""The shape of a model: all that a plan needs to know of it, as whole numbers.

    model_shape("gpt3-175b")                                      a preset of fmlab.models
    model_shape("gpt3-175b", vocab_size=51200)                    with a field of its config replaced
    model_shape(LlamaConfig(...)), model_shape(model)             a config, or a model (on meta, too)
    gpt_shape(layers=105, hidden=20480, heads=128, vocab=51200)   what no preset has
    llama_shape, bert_shape, t5_shape                             the same for other families

Parameter counts are exact: they equal those of the models themselves, whose tensors are never made here.
"""

from collections.abc import Mapping
from typing import Any

from fmlab.parallel.values import whole
from fmlab.planner.modelshape import ModelShape, Stream
from fmlab.planner.parts import NORMS, Convolution, Embedding, Head, LayerGroup, Residual

__all__ = [
    "Convolution",
    "Embedding",
    "Head",
    "LayerGroup",
    "ModelShape",
    "Residual",
    "Stream",
    "bert_shape",
    "gpt_shape",
    "llama_shape",
    "model_shape",
    "t5_shape",
]


def model_shape(model: Any, **changes: Any) -> ModelShape:
    """The shape of a preset (by name), a config or a model of fmlab.models; a shape comes back as it is.

    changes: fields of the config to replace, such as vocab_size=51200.

    Raises ValueError for an unknown preset, with the closest name, and for a model without formulas.
    """
    if isinstance(model, ModelShape):
        if changes:
            raise ValueError("changes are of a preset's or a config's fields; a ModelShape is final")
        return model
    from fmlab.planner.families import shape_of

    return shape_of(model, changes)


# ---- shapes without a preset -------------------------------------------------------------------------------


def gpt_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    kv_heads: int | None = None,
    head_width: int | None = None,
    ffn: int | None = None,
    gated: bool = False,
    positions: int = 0,
    tied: bool = True,
    bias: bool | str = True,
    norm: str = "layer",
    norms: int = -1,
    qk_norm: bool = False,
    rotary: bool = False,
    window: int = 0,
    experts: int = 0,
    experts_per_token: int = 0,
    shared_ffn: int = 0,
    dense_layers: int = 0,
    dense_ffn: int | None = None,
    name: str = "gpt",
    family: str = "GPT",
) -> ModelShape:
    """A decoder: by default GPT-2's kind of layer, with learned positions if `positions` are given.

    ffn: 4 x hidden if not given (of a gated network it must be). bias: True, False or "qkv" (Qwen2).
    norm: "layer", "layer without bias" (MPT) or "rms". norms: of a layer, if not 2 (1 where attention and
    feed-forward stand side by side). window: positions that a token sees at most.
    experts, experts_per_token, shared_ffn: a mixture; `ffn` is then that of one expert, and the first
    `dense_layers` have a network of `dense_ffn` instead.

    Raises ValueError for sizes that cannot be.
    """
    for size, value in (("layers", layers), ("hidden", hidden), ("heads", heads), ("vocab", vocab)):
        whole(value, f"{size}={value!r}")
    if head_width is None:
        head_width = _head_width(hidden, heads)
    if ffn is None:
        if gated or experts:
            raise ValueError("ffn= is needed: a gated network or an expert has no usual width")
        ffn = 4 * hidden
    if bias not in (True, False, "qkv"):
        raise ValueError(f"bias={bias!r}: legal are True, False, 'qkv'")
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r}: legal are {', '.join(NORMS)}")
    if not 0 <= whole(dense_layers, f"dense_layers={dense_layers!r}", 0) < layers or (
        dense_layers and not experts
    ):
        raise ValueError(
            f"dense_layers={dense_layers}: of a model with experts, fewer than its {layers} layers"
        )
    common: dict[str, Any] = dict(
        kind="decoder",
        width=hidden,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_width=head_width,
        gated=gated,
        window=window,
        norm=norm,
        norms=norms,
        qk_norm=qk_norm,
        rotary=rotary,
        qkv_bias=bool(bias),
        output_bias=bias is True,
        ffn_bias=bias is True,
    )
    mixture: dict[str, Any] = dict(
        experts=experts, experts_per_token=experts_per_token, shared_ffn=shared_ffn
    )
    groups = [LayerGroup(layers - dense_layers, ffn=ffn, **mixture, **common)]
    if dense_layers:
        if dense_ffn is None:
            raise ValueError("dense_layers= needs dense_ffn=, the inner width of their networks")
        groups.insert(0, LayerGroup(dense_layers, ffn=dense_ffn, **common))
    return ModelShape(
        name,
        family,
        (
            Embedding("tokens", hidden, tokens=vocab, positions=positions),
            *groups,
            Head("tokens", hidden, outputs=vocab, tied=tied, norm=norm),
        ),
        positions=positions,
    )


def llama_shape(*, name: str = "llama", family: str = "Llama", **sizes: Any) -> ModelShape:
    """A decoder as of today: gated network, RMS norms, no biases, rotary positions, its own output matrix.

    sizes: as of gpt_shape, whose defaults it changes.
    """
    usual: dict[str, Any] = dict(gated=True, norm="rms", bias=False, tied=False, rotary=True)
    return gpt_shape(name=name, family=family, **(usual | sizes))


def bert_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    ffn: int | None = None,
    positions: int = 512,
    token_types: int = 2,
    head: str = "pretraining",
    classes: int = 2,
    reads: float = 0.15,
    longest: int | None = None,
    name: str = "bert",
    family: str = "BERT",
) -> ModelShape:
    """An encoder of BERT's kind.

    head: "encoder" (none), "pooled", "masked", "pretraining" or "classifier", as in fmlab.models.BERTConfig.
    reads: share of the positions that have a label and go through the output matrix.
    longest: tokens of a row, where not all positions are given to tokens (RoBERTa).
    """
    ffn = 4 * whole(hidden, f"hidden={hidden!r}") if ffn is None else ffn
    pooler = Head("tokens", hidden, dense=hidden * hidden, others=hidden, per_row=True)
    masked = Head(
        "tokens", hidden, outputs=vocab, tied=True, dense=hidden * hidden, norm="layer", reads=reads,
        others=hidden, output_bias=True,
    )  # fmt: skip
    classifier = Head(
        "tokens",
        hidden,
        outputs=classes if head == "classifier" else 2,
        per_row=True,
        output_bias=True,
    )
    ends: dict[str, tuple[Head, ...]] = {
        "encoder": (),
        "pooled": (pooler,),
        "masked": (masked,),
        "pretraining": (pooler, classifier, masked),
        "classifier": (pooler, classifier),
    }
    if head not in ends:
        raise ValueError(f"head={head!r}: legal are {', '.join(ends)}")
    width = _head_width(hidden, heads)
    return ModelShape(
        name,
        family,
        (
            Embedding("tokens", hidden, vocab, positions, token_types, norm="layer"),
            LayerGroup(layers, "encoder", hidden, heads, heads, width, ffn),
            *ends[head],
        ),
        positions=positions if longest is None else longest,
    )


def t5_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    head_width: int,
    ffn: int,
    vocab: int,
    decoder_layers: int | None = None,
    gated: bool = False,
    tied: bool = True,
    buckets: int = 32,
    name: str = "t5",
) -> ModelShape:
    """An encoder and a decoder of T5's kind; its streams are "input" and "output"."""
    common: dict[str, Any] = dict(
        width=hidden, heads=heads, kv_heads=heads, head_width=head_width, ffn=ffn, gated=gated, norm="rms",
        score_bias=True, activation_kept=gated, qkv_bias=False, output_bias=False, ffn_bias=False,
    )  # fmt: skip
    encoder = _with_buckets(layers, buckets, common | dict(kind="encoder", stream="input"))
    cross = dict(kind="decoder", stream="output", cross_width=hidden, cross_stream="input")
    decoder = _with_buckets(layers if decoder_layers is None else decoder_layers, buckets, common | cross)
    return ModelShape(
        name,
        "T5",
        (
            Embedding("input", hidden, tokens=vocab),
            *encoder,
            Head("input", hidden, norm="rms"),
            Embedding("output", hidden, tokens=vocab, shared=True),
            *decoder,
            Head("output", hidden, outputs=vocab, tied=tied, norm="rms"),
        ),
        (Stream("input"), Stream("output")),
    )


def _with_buckets(layers: int, buckets: int, common: Mapping[str, Any]) -> list[LayerGroup]:
    """A stack of layers of which the first has the table of relative positions."""
    first = LayerGroup(1, buckets=buckets, **common)
    return [first, *([LayerGroup(layers - 1, **common)] if whole(layers, f"layers={layers!r}") > 1 else [])]


def _head_width(hidden: int, heads: int) -> int:
    if whole(hidden, f"hidden={hidden!r}") % whole(heads, f"heads={heads!r}"):
        raise ValueError(
            f"heads={heads} does not divide hidden={hidden}; choose one that does, or give head_width="
        )
    return hidden // heads
