"""What the recurrent and the convolutional language models share: token vectors, head, and the way through.

Shapes: b batch, l length, n rows (tokens), d model width, v vocabulary.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fmlab.models.base import Model
from fmlab.models.dropout import drop_out
from fmlab.models.gpt import CrossEntropy
from fmlab.models.inputs import check_values
from fmlab.models.layers import Embedding, Linear
from fmlab.models.state import Block, State


class TokenEmbedding(Block):
    """input_ids -> hidden: a vector a token. The order of the tokens is in the layers."""

    reads = ("input_ids",)
    writes = ("hidden",)

    def __init__(self, vocab_size: int, hidden_size: int, dropout: float = 0.0):
        super().__init__()
        self.tokens = Embedding(vocab_size, hidden_size)
        self.dropout = dropout

    def forward(self, state: State) -> State:
        return state.updated(
            hidden=drop_out(self.tokens(state.input_ids), self.dropout, self.training, "bld")
        )


class TokenHead(Block):
    """hidden -> logits, or with labels -> loss_sum, for which the logits are never held in full."""

    reads = ("hidden", "labels")
    writes = ("logits", "loss_sum")

    def __init__(self, vocab_size: int, hidden_size: int, norm: nn.Module, cross_entropy: CrossEntropy):
        super().__init__()
        self.norm = norm
        self.tokens = Linear(hidden_size, vocab_size, bias=False)
        self.cross_entropy = cross_entropy

    def forward(self, state: State) -> State:
        hidden_bld = self.norm(state.hidden)
        if "labels" not in state:
            return state.updated(logits=self.tokens(hidden_bld))
        hidden_nd, labels_n = hidden_bld.flatten(0, 1), state.labels.flatten()
        return state.updated(loss_sum=self.cross_entropy(hidden_nd, self.tokens.weight, labels_n))


class SequenceLM(Model):
    """A language model without positions: token vectors, layers that know the order, head.

    `model(input_ids)` gives logits, `model(input_ids, labels=...)` the sum of the losses.
    """

    TOKEN_TABLES = (r"blocks\.\d+\.tokens\.weight",)

    def __init__(self, config: Any, layers: Sequence[Block], norm: nn.Module, cross_entropy: CrossEntropy):
        super().__init__()
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        first, last = TokenEmbedding(*size, config.dropout), TokenHead(*size, norm, cross_entropy)
        self.blocks = nn.ModuleList([first, *layers, last])
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Any = None,
    ) -> State:
        """Run all blocks.

        Args (all [b,l]):
            labels: the token that follows each input, ALREADY SHIFTED; -100 where there is none.
            attention_mask: 1 real, 0 padding, before or after the text.
            document_ids: equal for the tokens of one packed document, which see no other document's.
            cache: of `new_cache`; what was seen before.

        Returns a State with `logits` [b,l,v], or with `loss_sum` if labels were given.
        """
        state = self.prepare(input_ids, labels, attention_mask, document_ids, cache)
        kept = {} if cache is None else dict(cache.by_layer)
        try:
            for block in self.blocks:
                state = block(state)
        except BaseException:  # an interrupted call has not been: its first layers must not be ahead
            if cache is not None:
                cache.by_layer.clear()
                cache.by_layer.update(kept)
            raise
        if cache is not None:
            cache.length += input_ids.shape[1]
        return state

    def prepare(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Any = None,
    ) -> State:
        """Check a batch and make the State that the first block reads. Raises ValueError for other shapes."""
        if input_ids.dim() != 2 or not input_ids.numel():
            raise ValueError(
                f"input_ids must be [batch, length] with a token at least, got shape {list(input_ids.shape)}"
            )
        optional = dict(labels=labels, attention_mask=attention_mask, document_ids=document_ids)
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        for name, tensor in given.items():
            if tensor.shape != input_ids.shape:
                raise ValueError(
                    f"{name} must have the shape of input_ids, {list(input_ids.shape)}, "
                    f"got {list(tensor.shape)}"
                )
        check_values({"input_ids": input_ids, **given})
        if cache is not None and document_ids is not None:
            raise ValueError(
                "document_ids and cache cannot be used together: generate from one document a row"
            )
        if cache is not None and cache.batch != len(input_ids):
            raise ValueError(f"the cache is for a batch of {cache.batch}, got {len(input_ids)} rows")
        return State(given, input_ids=input_ids, cache=cache)

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The output matrix is the token embedding, if the config says so."""
        tied = ("blocks.0.tokens.weight", f"blocks.{self.config.num_layers + 1}.tokens.weight")
        return (tied,) if self.config.tie_embeddings else ()
