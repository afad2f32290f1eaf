"""GPT-2 and GPT-3, top to bottom: config, embedding block, layer block, head block, and a loop over them.

Pre-norm transformer decoder with learned positions, tanh-GELU, biases everywhere, and an output matrix tied
to the token embedding (Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165).

Shapes: b batch, l length, d hidden width, v vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, KVCache, causal_mask, sdpa_core
from fmlab.models.base import Model, check_dropout, check_heads, check_sizes
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.dropout import drop_out
from fmlab.models.hf import HFFormat
from fmlab.models.inputs import check_last, check_prefix, check_token_batch, next_positions
from fmlab.models.layers import MLP, Embedding, Linear, SelfAttention, add_residual, can_lend
from fmlab.models.plan import ParallelPlan, Rule, Stream
from fmlab.models.presets import GPT_PRESETS
from fmlab.models.state import Block, State, stream_length

CrossEntropy = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden[n,d], weight[v,d], labels[n]) -> loss sum


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT. `ffn_size` None means 4 * hidden_size. Raises ValueError for shapes that cannot be."""

    vocab_size: int
    max_positions: int
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int | None = None
    dropout: float = 0.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.ffn_size is None:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        check_sizes(self, "vocab_size", "max_positions", "num_layers", "hidden_size", "num_heads", "ffn_size")
        check_heads(self.hidden_size, self.num_heads)
        check_dropout(self, "dropout")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


class GPTEmbedding(Block):
    """input_ids, position_ids -> hidden: a token vector plus a position vector."""

    reads = ("input_ids", "position_ids")
    writes = ("hidden",)

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.positions = Embedding(config.max_positions, config.hidden_size)
        self.dropout = config.dropout

    def forward(self, state: State) -> State:
        if state.derived.get("one gradient for the tied table"):
            tokens_bld, state.derived["table"] = self.tokens.lend(state.input_ids)
        else:
            tokens_bld = self.tokens(state.input_ids)
        hidden_bld = tokens_bld + self.positions(state.position_ids)
        return state.updated(hidden=drop_out(hidden_bld, self.dropout, self.training, "bld"))


class GPTLayer(Block):
    """hidden -> hidden: attention, then the feed-forward network, each normed first, added to the stream."""

    reads = ("hidden", "attention_mask", "document_ids", "prefix_lengths")
    writes = ("hidden",)

    def __init__(self, config: GPTConfig, index: int, attention_core: AttentionCore):
        super().__init__()
        self.index = index  # which layer of the key/value cache is ours
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attention = SelfAttention(config.hidden_size, config.head_size, attention_core, config.dropout)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.ffn_size or 4 * config.hidden_size)
        self.dropout = config.dropout

    def forward(self, state: State) -> State:
        hidden = state.hidden  # [b,l,d]
        dropout = self.dropout if self.training else 0.0
        mask = causal_mask(state, queries=stream_length(state, "hidden"))
        update = self.attention(self.attention_norm(hidden), mask, state.cache, self.index)
        hidden = add_residual(hidden, update, self.attention.output.bias, dropout)
        update = self.mlp(self.mlp_norm(hidden))
        hidden = add_residual(hidden, update, self.mlp.down.bias, dropout)
        return state.updated(hidden=hidden)


class GPTHead(Block):
    """hidden -> logits, or with labels -> loss_sum, for which the logits are never held in full."""

    reads = ("hidden", "labels")
    writes = ("logits", "loss_sum")

    def __init__(self, config: GPTConfig, cross_entropy: CrossEntropy):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
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


class GPT(Model):
    """A GPT: `model(input_ids)` gives logits, `model(input_ids, labels=...)` the sum of the losses.

    Args:
        attention_core: see fmlab.models.attention; ring attention slips in here.
        cross_entropy: (hidden[n,d], weight[v,d], labels[n]) -> loss sum; a vocab-parallel loss slips in here.

    num_parameters(positions=False) is the "123.65M" in circulation for GPT-2.
    """

    CONFIG = GPTConfig
    PRESETS = GPT_PRESETS
    TOKEN_TABLES = (r"blocks\.\d+\.tokens\.weight",)
    POSITION_TABLES = (r"blocks\.0\.positions\.weight",)

    def __init__(
        self,
        config: GPTConfig,
        attention_core: AttentionCore = sdpa_core,
        cross_entropy: CrossEntropy = linear_cross_entropy,
    ):
        super().__init__()
        self.config: GPTConfig = config
        layers = [GPTLayer(config, index, attention_core) for index in range(config.num_layers)]
        self.blocks = nn.ModuleList([GPTEmbedding(config), *layers, GPTHead(config, cross_entropy)])
        self.finish()

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
        return State(given, input_ids=input_ids, cache=cache)

    def new_cache(self, batch: int, max_length: int | None = None) -> KVCache:
        """An empty key/value cache for `batch` rows of up to `max_length` tokens (default: all positions)."""
        max_length = self.config.max_positions if max_length is None else max_length
        if max_length > self.config.max_positions:
            raise ValueError(
                f"max_length={max_length} exceeds the model's {self.config.max_positions} positions"
            )
        qkv = self.get_parameter("blocks.1.attention.qkv.weight")
        heads = qkv.shape[0] // (3 * self.config.head_size)  # of this rank, if the heads are divided
        return KVCache(
            self.config.num_layers, batch, heads, max_length, self.config.head_size, qkv.dtype, qkv.device
        )

    # ---- weights -------------------------------------------------------------------------------------------

    @property
    def embedding(self) -> GPTEmbedding:
        return cast(GPTEmbedding, self.blocks[0])

    @property
    def head(self) -> GPTHead:
        return cast(GPTHead, self.blocks[-1])

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The output matrix is the token embedding, if the config says so."""
        tied = ("blocks.0.tokens.weight", f"blocks.{self.config.num_layers + 1}.tokens.weight")
        return (tied,) if self.config.tie_embeddings else ()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all weights anew: normal with init_std, biases 0, norms 1.

        The two projections that write into the residual stream get init_std / sqrt(2 * layers), so that the
        stream's variance does not grow with depth (Radford et al. 2019, section 2.3).
        """
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(("attention.output.weight", "mlp.down.weight")):
                parameter.normal_(0.0, std / (2 * self.config.num_layers) ** 0.5)
            else:
                parameter.normal_(0.0, std)

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut."""
        head = self.config.head_size
        return ParallelPlan(
            rules=(
                Rule(r"blocks\.\d+\.tokens\.weight", "vocab"),
                Rule(r"blocks\.0\.positions\.weight", "replicate"),
                Rule(r".*norm\.(weight|bias)", "replicate"),
                Rule(r".*\.attention\.qkv\.(weight|bias)", "column", parts=3, unit=head),
                Rule(r".*\.attention\.output\.weight", "row", unit=head),
                Rule(r".*\.mlp\.up\.(weight|bias)", "column"),
                Rule(r".*\.mlp\.down\.weight", "row"),
                Rule(r".*\.(attention\.output|mlp\.down)\.bias", "replicate"),
            ),
            tied=self.ties(),
            cuts=tuple(range(1, len(self.blocks))),
            sequence=("input_ids", "labels", "attention_mask", "document_ids", "position_ids"),
            streams=(Stream("hidden", "input_ids", (1, len(self.blocks) - 1)),),
        )

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' GPT2LMHeadModel."""
        from fmlab.models.gpt_hf import FORMAT

        return FORMAT
