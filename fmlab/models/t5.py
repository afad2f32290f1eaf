"""T5: an encoder over the input, and a decoder over the output that also looks at the encoder.

Pre-norm transformers with RMS norms and no biases in matrices; positions enter as learned biases of the
attention scores; scores are not divided by sqrt(head_size), the initial weights of the queries are smaller
instead (Raffel et al. 2020, arXiv:1910.10683). Version 1.1 has gated GELU and an output matrix of its own.
The blocks are in t5_blocks.

Shapes: b batch, l input length, t output length, d hidden width, v vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, KVCache, sdpa_core
from fmlab.models.base import Model
from fmlab.models.cross_entropy import IGNORE, linear_cross_entropy
from fmlab.models.gpt import CrossEntropy
from fmlab.models.hf import HFFormat
from fmlab.models.inputs import check_values
from fmlab.models.layers import can_lend
from fmlab.models.plan import ParallelPlan, Rule, Stream
from fmlab.models.state import State
from fmlab.models.t5_blocks import T5DecoderLayer, T5Embedding, T5EncoderEnd, T5EncoderLayer, T5Head
from fmlab.models.t5_config import T5_PRESETS, T5Config

START = 0  # T5 has no token of its own for the start: the padding token begins every output


def shift_right(labels: Tensor, start: int = START) -> Tensor:
    """What the decoder reads to predict `labels` [b,t]: the start token, then all labels but the last.

    Labels of -100 (no target) become the start token, which is also the padding.
    """
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == IGNORE, start)


class T5(Model):
    """A T5: `model(input_ids, labels=...)` gives the sum of the losses, `model(input_ids,
    decoder_input_ids=...)` gives logits.

    Args:
        attention_core: see fmlab.models.attention.
        cross_entropy: (hidden[n,d], weight[v,d], labels[n]) -> loss sum; a vocab-parallel loss slips in here.
    """

    CONFIG = T5Config
    PRESETS = T5_PRESETS
    TOKEN_TABLES = (r"blocks\.\d+\.tokens\.weight",)

    def __init__(
        self,
        config: T5Config,
        attention_core: AttentionCore = sdpa_core,
        cross_entropy: CrossEntropy = linear_cross_entropy,
    ):
        super().__init__()
        self.config: T5Config = config
        encoder = [T5EncoderLayer(config, index, attention_core) for index in range(config.num_layers)]
        decoder = [T5DecoderLayer(config, index, attention_core) for index in range(config.decoder_layers)]
        self.blocks = nn.ModuleList(
            [
                T5Embedding(config, "input_ids", "encoder_hidden"),
                *encoder,
                T5EncoderEnd(config),
                T5Embedding(config, "decoder_input_ids", "hidden"),
                *decoder,
                T5Head(config, cross_entropy),
            ]
        )
        self.finish()

    def forward(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> State:
        """Run all blocks.

        Args:
            input_ids: [b,l], for the encoder. None if `cache` holds an encoded input already.
            labels: [b,t], the output; -100 where there is no target. The first one is predicted from the
                start token.
            attention_mask: [b,l], 1 real, 0 padding of the input.
            decoder_input_ids: [b,t], shift_right(labels) if not given.
            decoder_attention_mask: [b,t], 1 real, 0 padding. With a cache it describes the new tokens only.
            cache: filled and read: the first call encodes the input, later ones go on with the output.
                Nothing that comes out of such a call can be differentiated.

        Returns a State with `logits` [b,t,v], or with `loss_sum` if labels were given.
        """
        state = self.prepare(
            input_ids, labels, attention_mask, decoder_input_ids, decoder_attention_mask, cache
        )
        if labels is not None and self._can_lend():
            state.derived["one gradient for the tied table"] = True
        first = self.config.decoder_start if "encoder_hidden" in state else 0
        # Buffers that are written in place and read by every later call are no part of a graph.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            for block in self.blocks[first:]:
                state = block(state)
        if cache is not None:
            if state.cache is not cache:
                raise RuntimeError("a wrapper of the blocks lost the cache (FSDP with mixed precision does)")
            cache.finish(state.decoder_input_ids.shape[1])
            cache.source = {n: state[n] for n in ("encoder_hidden", "attention_mask") if n in state}
        return state

    def prepare(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> State:
        """Check a batch and make the State that the first block reads; arguments as for forward.

        Raises ValueError for shapes that do not agree, an input too few or too many, and no output.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError(
                    "T5 needs to know what its decoder reads: give labels (training), or decoder_input_ids "
                    f"that begin with the start token {START} (generation)"
                )
            decoder_input_ids = shift_right(labels)
        optional = dict(
            input_ids=input_ids,
            labels=labels,
            attention_mask=attention_mask,
            decoder_attention_mask=decoder_attention_mask,
        )
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        given |= self._source(given, cache)
        given["decoder_input_ids"] = decoder_input_ids
        _check_shapes(given)
        if cache is not None:
            if cache.batch != len(decoder_input_ids):
                raise ValueError(
                    f"the cache is for a batch of {cache.batch}, got {len(decoder_input_ids)} rows"
                )
            if not cache.source:
                cache.memory.clear()  # of another input, if a first call has failed
            cache.begin(decoder_input_ids.shape[1], decoder_attention_mask)
        return State(given, cache=cache)

    @staticmethod
    def _source(given: dict[str, Tensor], cache: KVCache | None) -> dict[str, Tensor]:
        """The encoded input that the cache holds. Raises ValueError unless there is one input in all."""
        if cache is not None and cache.source:
            again = [name for name in ("input_ids", "attention_mask") if name in given]
            if again:
                raise ValueError(
                    f"the cache holds an encoded input, so {' and '.join(again)} would do nothing; pass "
                    "input_ids=None, or take a new cache for a new input"
                )
            return dict(cache.source)
        if "input_ids" not in given:
            raise ValueError("input_ids is needed, [b,l]: no cache that holds an encoded input was given")
        return {}

    def _can_lend(self) -> bool:
        """Whether the table may go from embedding to embedding to head, so that they make one gradient."""
        first, second = (cast(T5Embedding, self.blocks[i]).tokens for i in (0, self.config.decoder_start))
        loss = self.head.cross_entropy
        tied = not self.config.tie_embeddings or can_lend(first, self.head.tokens, loss)
        return tied and can_lend(first, second, loss) and can_lend(second, first, loss)

    def new_cache(self, batch: int, max_length: int = 512) -> KVCache:
        """An empty cache for `batch` rows of up to `max_length` tokens of output; the model sets no limit."""
        qkv = self.get_parameter(f"blocks.{self.config.decoder_start + 1}.attention.qkv.weight")
        size = self.config.head_size
        heads = qkv.shape[0] // (3 * size)  # of this rank, if the heads are divided
        return KVCache(self.config.decoder_layers, batch, heads, max_length, size, qkv.dtype, qkv.device)

    # ---- weights -------------------------------------------------------------------------------------------

    @property
    def head(self) -> T5Head:
        return cast(T5Head, self.blocks[-1])

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Both embeddings are one table, and so is the output matrix if the config says so."""
        tied = ["blocks.0.tokens.weight", f"blocks.{self.config.decoder_start}.tokens.weight"]
        if self.config.tie_embeddings:
            tied.append(f"blocks.{len(self.blocks) - 1}.tokens.weight")
        return (tuple(tied),)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all weights anew as Mesh TensorFlow does: normal, with 1 / fan-in as variance.

        Queries get 1 / (fan-in * head_size), because T5 does not divide the scores by sqrt(head_size), and
        embeddings 1. A separate output matrix (v1.1) gets 1 / fan-in; transformers gives it 1, with which
        the first loss is far from ln v.
        """
        config = self.config
        fan_in = config.hidden_size**-0.5
        std = {
            "attention.output": (config.num_heads * config.head_size) ** -0.5,
            "cross.output": (config.num_heads * config.head_size) ** -0.5,
            "cross.query": (config.hidden_size * config.head_size) ** -0.5,
            "mlp.down": config.ffn_size**-0.5,
        }
        for name, parameter in self.named_parameters():
            _, index, kind, _ = (*name.split(".", 2), "")
            kind = kind.removesuffix(".weight")
            if "norm" in kind:
                parameter.fill_(config.init_factor)
            elif kind == "tokens":
                embedding = index != str(len(self.blocks) - 1)
                parameter.normal_(0.0, config.init_factor * (1.0 if embedding else fan_in))
            else:
                parameter.normal_(0.0, config.init_factor * std.get(kind, fan_in))
                if kind == "attention.qkv":
                    parameter[: len(parameter) // 3] *= config.head_size**-0.5

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        head = self.config.head_size
        mlp = Rule(r".*\.mlp\.up\.weight", "column")
        if self.config.gated:
            mlp = Rule(r".*\.mlp\.gate_up\.weight", "column", parts=2)
        return ParallelPlan(
            rules=(
                Rule(r"blocks\.\d+\.tokens\.weight", "vocab"),
                Rule(r".*\.position_bias\.weight", "head"),
                Rule(r".*norm\.weight", "replicate"),
                Rule(r".*\.attention\.qkv\.weight", "column", parts=3, unit=head),
                Rule(r".*\.cross\.query\.weight", "column", unit=head),
                Rule(
                    r".*\.cross\.key_value\.weight",
                    "column",
                    parts=2,
                    unit=head,
                    stream="encoder_hidden",
                ),
                Rule(r".*\.(attention|cross)\.output\.weight", "row", unit=head),
                mlp,
                Rule(r".*\.mlp\.down\.weight", "row"),
            ),
            tied=self.ties(),
            cuts=tuple(range(1, len(self.blocks))),
            streams=(
                Stream("encoder_hidden", "input_ids", (1, self.config.decoder_start - 1)),
                Stream("hidden", "decoder_input_ids", (self.config.decoder_start + 1, len(self.blocks) - 1)),
            ),
        )

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' T5ForConditionalGeneration."""
        from fmlab.models.t5_hf import FORMAT

        return FORMAT


def _check_shapes(given: dict[str, Tensor]) -> None:
    source = "input_ids" if "input_ids" in given else "encoder_hidden"
    for name in ("input_ids", "decoder_input_ids"):
        if name in given and (given[name].dim() != 2 or not given[name].numel()):
            raise ValueError(
                f"{name} must be [batch, length] with a token at least, got shape {list(given[name].shape)}"
            )
    pairs = [(source, "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")]
    for like, name in [*pairs, ("decoder_input_ids", "labels")]:
        wanted = list(given[like].shape[:2])
        if name in given and list(given[name].shape) != wanted:
            raise ValueError(f"{name} must have the shape of {like}, {wanted}, got {list(given[name].shape)}")
    check_values(given)
    rows, outputs = len(given[source]), len(given["decoder_input_ids"])
    if rows != outputs:
        raise ValueError(f"there are {rows} inputs and {outputs} outputs; there must be as many")
