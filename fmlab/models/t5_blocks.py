"""The blocks of T5: embeddings and layers of both streams, the end of the encoder, the output head.

Shapes: b batch, l input length, t output length, d hidden width, h heads, q queries, s keys, v vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

from fmlab.models.attention import AttentionCore, bidirectional_mask, causal_mask, cross_mask
from fmlab.models.attention.t5_buckets import t5_bias
from fmlab.models.dropout import drop_out
from fmlab.models.gpt import CrossEntropy
from fmlab.models.layers import (
    MLP,
    Embedding,
    GatedMLP,
    GroupedAttention,
    Linear,
    RMSNorm,
    SelfAttention,
    add_residual,
    gelu_tanh,
)
from fmlab.models.state import Block, State, stream_length
from fmlab.models.t5_config import T5Config


class T5Embedding(Block):
    """Token ids -> their vectors, of either stream; positions are the attention's affair."""

    def __init__(self, config: T5Config, ids: str, stream: str):
        super().__init__()
        self.reads, self.writes = (ids,), (stream,)
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.dropout = config.dropout

    def forward(self, state: State) -> State:
        (ids,), (stream,) = self.reads, self.writes
        if state.derived.get("one gradient for the tied table"):
            # The table goes from embedding to embedding to head.
            vectors, state.derived["table"] = self.tokens.lend(state[ids], state.derived.get("table"))
        else:
            vectors = self.tokens(state[ids])
        return state.updated(**{stream: drop_out(vectors, self.dropout, self.training, "bld")})


class _T5Layer(Block):
    """What the layers of both stacks share: attention to the own stream, and the feed-forward network."""

    def __init__(self, config: T5Config, index: int, core: AttentionCore, stream: str, padding: str):
        super().__init__()
        d, heads, size, dropout = config.hidden_size, config.num_heads, config.head_size, config.dropout
        self.stream = stream
        self.index = index  # which layer of the key/value cache is ours
        self.max_distance, self.dropout = config.max_distance, dropout
        self.attention_norm = RMSNorm(d, config.norm_eps)
        self.attention = SelfAttention(d, size, core, dropout, heads=heads, bias=False, scale=1.0)
        self.mlp_norm = RMSNorm(d, config.norm_eps)
        self.mlp = (
            GatedMLP(d, config.ffn_size, gelu_tanh, dropout)
            if config.gated
            else MLP(d, config.ffn_size, F.relu, bias=False, dropout=dropout)
        )
        self.bias = f"{'encoder' if stream == 'encoder_hidden' else 'decoder'}_bias"
        self.reads, self.writes = (stream, padding), (stream,)
        if index:
            self.reads += (self.bias,)
        else:  # the first layer makes the bias for all
            self.writes += (self.bias,)
            self.position_bias = Embedding(config.num_buckets, heads)

    def _bias(self, state: State, queries: int, keys: int, bidirectional: bool) -> Tensor:
        """The bias by relative position, [1,h,q,s]: made in the first layer, handed on to the others."""
        if self.index:
            return state[self.bias]
        return t5_bias(self.position_bias.weight, queries, keys, bidirectional, self.max_distance)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return add_residual(hidden, self.mlp(self.mlp_norm(hidden)), dropout=dropout)


class T5EncoderLayer(_T5Layer):
    """encoder_hidden -> encoder_hidden: attention to the whole input, then the feed-forward network."""

    def __init__(self, config: T5Config, index: int, core: AttentionCore):
        super().__init__(config, index, core, "encoder_hidden", "attention_mask")

    def forward(self, state: State) -> State:
        hidden = state.encoder_hidden  # [b,l,d]
        length = stream_length(state, "encoder_hidden")
        dropout = self.dropout if self.training else 0.0
        bias = self._bias(state, length, length, bidirectional=True)
        mask = bidirectional_mask(state, length)
        update = self.attention(self.attention_norm(hidden), mask, bias=bias)
        hidden = self._feed_forward(add_residual(hidden, update, dropout=dropout))
        return state.updated(encoder_hidden=hidden, encoder_bias=bias)


class T5EncoderEnd(Block):
    """encoder_hidden, normed: what the decoder looks at."""

    reads = writes = ("encoder_hidden",)

    def __init__(self, config: T5Config):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.dropout = config.dropout

    def forward(self, state: State) -> State:
        hidden = drop_out(self.norm(state.encoder_hidden), self.dropout, self.training, "bld")
        return state.updated(encoder_hidden=hidden)


class T5DecoderLayer(_T5Layer):
    """hidden -> hidden: attention to the output so far, to the encoder, then the feed-forward network.

    Attention to the encoder has no bias by position: there is no distance between the two texts.
    """

    def __init__(self, config: T5Config, index: int, core: AttentionCore):
        super().__init__(config, index, core, "hidden", "decoder_attention_mask")
        self.reads += ("encoder_hidden", "attention_mask")
        d, heads, size = config.hidden_size, config.num_heads, config.head_size
        self.cross_norm = RMSNorm(d, config.norm_eps)
        self.cross = GroupedAttention(d, size, heads, core, config.dropout, bias=False, scale=1.0)

    def forward(self, state: State) -> State:
        hidden, memory = state.hidden, state.encoder_hidden  # [b,t,d], [b,l,d]
        queries, dropout = stream_length(state, "hidden"), self.dropout if self.training else 0.0
        mask = causal_mask(state, queries, "decoder_attention_mask")
        bias = self._bias(state, queries, mask.keys, bidirectional=False)
        update = self.attention(self.attention_norm(hidden), mask, state.cache, self.index, bias)
        hidden = add_residual(hidden, update, dropout=dropout)
        mask = cross_mask(state, queries, stream_length(state, "encoder_hidden"))
        update = self.cross(self.cross_norm(hidden), mask, state.cache, self.index, memory=memory)
        hidden = self._feed_forward(add_residual(hidden, update, dropout=dropout))
        return state.updated(hidden=hidden, decoder_bias=bias)


class T5Head(Block):
    """hidden -> logits, or with labels -> loss_sum, for which the logits are never held in full."""

    reads = ("hidden", "labels")
    writes = ("logits", "loss_sum")

    def __init__(self, config: T5Config, cross_entropy: CrossEntropy):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.tokens = Linear(config.hidden_size, config.vocab_size, bias=False)
        # Rows of the embedding are about sqrt(d) long: with them as output matrix, what comes out of the norm
        # must be made shorter, or the first loss is about 140 instead of ln v.
        self.tied = config.tie_embeddings
        self.scale = config.hidden_size**-0.5 if config.tie_embeddings else 1.0
        self.dropout = config.dropout
        self.cross_entropy = cross_entropy

    def forward(self, state: State) -> State:
        hidden_btd = drop_out(self.norm(state.hidden), self.dropout, self.training, "bld") * self.scale
        if "labels" not in state:
            return state.updated(logits=self.tokens(hidden_btd))
        # Lent by the embeddings. Taken out, so that a kept State does not keep the graph alive.
        table = state.derived.pop("table", None)
        weight = table if self.tied and table is not None else self.tokens.weight
        loss_sum = self.cross_entropy(hidden_btd.flatten(0, 1), weight, state.labels.flatten())
        return state.updated(loss_sum=loss_sum)
