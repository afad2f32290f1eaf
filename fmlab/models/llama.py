"""Llama, top to bottom: config, embedding block, layer block, head block, and a loop over them.

The decoder of today: RMSNorm before each half, rotary positions, SwiGLU, fewer key/value heads than query
heads, no biases (Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Dubey et al. 2024,
arXiv:2407.21783). `Qwen2` is the same with biases on queries, keys and values.

Rotary pairs are half-split, as in Hugging Face's checkpoints; Meta's own files have the rows of the query
and key matrices in another order.

Shapes: b batch, l length, d hidden width, v vocabulary.
"""

from collections.abc import Iterable
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, KVCache, causal_mask, sdpa_core
from fmlab.models.attention.rotary import DynamicNTKScaling, rotate
from fmlab.models.base import Model
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.gpt import CrossEntropy
from fmlab.models.hf import HFFormat
from fmlab.models.inputs import check_last, check_positions, check_prefix, check_token_batch, next_positions
from fmlab.models.layers import (
    Embedding,
    GatedMLP,
    GroupedAttention,
    Linear,
    RMSNorm,
    add_residual,
    can_lend,
)
from fmlab.models.llama_config import LLAMA_PRESETS, QWEN_PRESETS, LlamaConfig
from fmlab.models.plan import ParallelPlan, Rule, Stream
from fmlab.models.state import Block, State, stream_length


class LlamaEmbedding(Block):
    """input_ids -> hidden: a token vector; positions enter in every layer."""

    reads = ("input_ids",)
    writes = ("hidden",)

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)

    def forward(self, state: State) -> State:
        if state.derived.get("one gradient for the tied table"):
            hidden_bld, state.derived["table"] = self.tokens.lend(state.input_ids)
            return state.updated(hidden=hidden_bld)
        return state.updated(hidden=self.tokens(state.input_ids))


class LlamaLayer(Block):
    """hidden -> hidden: attention, then the gated network, each normed first, added to the stream."""

    reads: tuple[str, ...] = ("hidden", "position_ids", "attention_mask", "document_ids", "prefix_lengths")
    writes: tuple[str, ...] = ("hidden",)

    def __init__(self, config: LlamaConfig, index: int, attention_core: AttentionCore):
        super().__init__()
        self.index = index  # which layer of the key/value cache is ours
        self.rotary, self.max_positions = config.rotary, config.max_positions
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = GroupedAttention(
            config.hidden_size,
            config.head_width,
            config.num_heads,
            attention_core,
            kv_heads=config.kv_heads,
            bias=config.qkv_bias,
            output_bias=False,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: nn.Module = GatedMLP(config.hidden_size, config.ffn_size)

    def attend(self, state: State) -> Tensor:
        """The stream after the first half of the layer, [b,l,d]."""
        hidden = state.hidden
        mask = causal_mask(state, queries=stream_length(state, "hidden"))
        cos, sin = state.once(
            "rotary", lambda: self.rotary(state.position_ids, self.text_length(state.cache))
        )
        update = self.attention(
            self.attention_norm(hidden),
            mask,
            state.cache,
            self.index,
            rotate=lambda query, key: (rotate(query, cos, sin), rotate(key, cos, sin)),
        )
        return add_residual(hidden, update)

    def text_length(self, cache: KVCache | None) -> int | None:
        """For rotary scalings that depend on it: with a cache one number from the first token to the last."""
        if cache is None:
            return None
        return self.max_positions if cache.text_length is None else cache.text_length

    def forward(self, state: State) -> State:
        hidden = self.attend(state)
        return state.updated(hidden=add_residual(hidden, self.mlp(self.mlp_norm(hidden))))


class LlamaHead(Block):
    """hidden -> logits, or with labels -> loss_sum, for which the logits are never held in full."""

    reads: tuple[str, ...] = ("hidden", "labels")
    writes: tuple[str, ...] = ("logits", "loss_sum")

    def __init__(self, config: LlamaConfig, cross_entropy: CrossEntropy):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.tokens = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.cross_entropy = cross_entropy

    def forward(self, state: State) -> State:
        if "labels" not in state:
            read = slice(-state.derived["last"], None) if "last" in state.derived else slice(None)
            return state.updated(logits=self.tokens(self.norm(state.hidden[:, read])))
        hidden_bld = self.norm(state.hidden)
        # Lent by the embedding, if tied. Taken out, so that a kept State does not keep the graph alive.
        weight = state.derived.pop("table", self.tokens.weight)
        loss_sum = self.cross_entropy(hidden_bld.flatten(0, 1), weight, state.labels.flatten())
        return state.updated(loss_sum=loss_sum)


class Llama(Model):
    """A Llama: `model(input_ids)` gives logits, `model(input_ids, labels=...)` the sum of the losses.

    Args:
        attention_core: see fmlab.models.attention; ring attention slips in here.
        cross_entropy: (hidden[n,d], weight[v,d], labels[n]) -> loss sum; a vocab-parallel loss slips in here.
    """

    CONFIG = LlamaConfig
    PRESETS = LLAMA_PRESETS
    TOKEN_TABLES = (r"blocks\.\d+\.tokens\.weight",)

    def __init__(
        self,
        config: LlamaConfig,
        attention_core: AttentionCore = sdpa_core,
        cross_entropy: CrossEntropy = linear_cross_entropy,
    ):
        super().__init__()
        self.config: LlamaConfig = config
        layers = [self.LAYER(config, index, attention_core) for index in range(config.num_layers)]
        self.blocks = nn.ModuleList([LlamaEmbedding(config), *layers, self.HEAD(config, cross_entropy)])
        self.finish()

    #: What a family that differs in one block replaces.
    LAYER: ClassVar[type[LlamaLayer]] = LlamaLayer
    HEAD: ClassVar[type[LlamaHead]] = LlamaHead

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        prefix_lengths: Tensor | None = None,
        last: int | None = None,
    ) -> State:
        """Run all blocks.

        Args (all [b,l] but the last two):
            labels: the token that follows each input, ALREADY SHIFTED; -100 where there is none.
            attention_mask: 1 real, 0 padding. With a cache it describes the new tokens only.
            document_ids: equal for the tokens of one packed document, which see no other document's.
            cache: filled and read; nothing that comes out of such a call can be differentiated.
            position_ids: from 0 at each row's or document's first real token, if not given.
            prefix_lengths: [b], how many real tokens at the start of each row see each other in both
                directions (prefix LM); with a cache the first call holds all of them.
            last: an int: the logits of the last so many tokens only, all that a generation reads.

        Returns a State with `logits` [b,l,v], or with `loss_sum` if labels were given.
        """
        state = self.prepare(
            input_ids, labels, attention_mask, document_ids, position_ids, cache, prefix_lengths
        )
        if labels is not None and can_lend(self.embedding.tokens, self.head.tokens, self.head.cross_entropy):
            state.derived["one gradient for the tied table"] = True
        if last is not None:
            state.derived["last"] = check_last(last, labels)
        # Buffers that are written in place and read by every later call are no part of a graph.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            for block in self.blocks:
                state = block(state)
        if cache is not None:
            if state.cache is not cache:
                raise RuntimeError("a wrapper of the blocks lost the cache (FSDP with mixed precision does)")
            cache.finish(input_ids.shape[1])
        return state

    def prepare(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> State:
        """Check a batch and make the State that the first block reads; arguments as for forward.

        Raises ValueError for shapes that do not agree and for more tokens than positions.
        """
        optional = dict(
            labels=labels, attention_mask=attention_mask, document_ids=document_ids, position_ids=position_ids
        )
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        check_token_batch(input_ids, given, cache, self.config.max_positions)
        if prefix_lengths is not None:
            check_prefix(input_ids, prefix_lengths, document_ids)
            given["prefix_lengths"] = prefix_lengths
        positions = next_positions(input_ids, attention_mask, document_ids, cache)
        given.setdefault("position_ids", positions)
        if position_ids is not None or document_ids is not None:
            check_positions(given["position_ids"], self.config.max_positions)
        return State(given, input_ids=input_ids, cache=cache)

    def new_cache(self, batch: int, max_length: int | None = None) -> KVCache:
        """An empty key/value cache for `batch` rows of up to `max_length` tokens (default: all positions)."""
        max_length = self.config.max_positions if max_length is None else max_length
        if max_length > self.config.max_positions:
            raise ValueError(
                f"max_length={max_length} exceeds the model's {self.config.max_positions} positions"
            )
        weight = self.get_parameter("blocks.1.attention.key_value.weight")
        heads = weight.shape[0] // (2 * self.config.head_width)  # of this rank, if the heads are divided
        return KVCache(
            self.config.num_layers,
            batch,
            heads,
            max_length,
            self.config.head_width,
            weight.dtype,
            weight.device,
        )

    # ---- weights -------------------------------------------------------------------------------------------

    @property
    def embedding(self) -> LlamaEmbedding:
        return cast(LlamaEmbedding, self.blocks[0])

    @property
    def head(self) -> LlamaHead:
        return cast(LlamaHead, self.blocks[-1])

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The output matrix is the token embedding, if the config says so."""
        tied = ("blocks.0.tokens.weight", f"blocks.{self.config.num_layers + 1}.tokens.weight")
        return (tied,) if self.config.tie_embeddings else ()

    def reset_parameters(self) -> None:
        """Fill all weights anew; see fill_weights."""
        fill_weights(self.named_parameters(), self.config)

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        unit = self.config.head_width
        attention = [
            Rule(r".*\.attention\.query\.weight", "column", unit=unit),
            Rule(r".*\.attention\.key_value\.weight", "column", parts=2, unit=unit, shared=True),
        ]
        if self.config.qkv_bias:
            attention += [
                Rule(r".*\.attention\.query\.bias", "column", unit=unit),
                Rule(r".*\.attention\.key_value\.bias", "column", parts=2, unit=unit, shared=True),
            ]
        return ParallelPlan(
            rules=(
                Rule(r"blocks\.\d+\.tokens\.weight", "vocab"),
                Rule(r".*norm\.weight", "replicate"),
                *attention,
                Rule(r".*\.attention\.output\.weight", "row", unit=unit),
                *self.mlp_rules(),
            ),
            tied=self.ties(),
            cuts=tuple(range(1, len(self.blocks))),
            streams=self.streams(),
            # A rotary scaling that looks at how long the text is must see all of it.
            sequence=()
            if isinstance(self.config.rotary.scaling, DynamicNTKScaling)
            else ("input_ids", "labels", "attention_mask", "document_ids", "position_ids"),
        )

    def streams(self) -> tuple[Stream, ...]:
        """The plan's streams: all behind the embedding treats each position by itself."""
        return (Stream("hidden", "input_ids", (1, len(self.blocks) - 1)),)

    def mlp_rules(self) -> tuple[Rule, ...]:
        """The plan's rules for the second half of a layer."""
        return (
            Rule(r".*\.mlp\.gate_up\.weight", "column", parts=2),
            Rule(r".*\.mlp\.down\.weight", "row"),
        )

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' LlamaForCausalLM."""
        from fmlab.models.llama_hf import LLAMA

        return LLAMA


@torch.no_grad()
def fill_weights(named: Iterable[tuple[str, Tensor]], config: LlamaConfig) -> None:
    """Fill a Llama's weights anew: normal with init_std, biases 0, norms 1.

    The papers do not say how. As in GPT-2, the two matrices that write into the residual stream (and not the
    gate) get init_std / sqrt(2 * layers); transformers gives every matrix init_std.
    """
    for name, parameter in named:
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith(("attention.output.weight", "mlp.down.weight", "mlp.down")):
            parameter.normal_(0.0, config.init_std / (2 * config.num_layers) ** 0.5)
        else:
            parameter.normal_(0.0, config.init_std)


class Qwen2(Llama):
    """Qwen2 and 2.5: a Llama with biases on queries, keys and values, in transformers' Qwen2 format."""

    PRESETS = QWEN_PRESETS

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' Qwen2ForCausalLM."""
        from fmlab.models.llama_hf import QWEN2

        return QWEN2
