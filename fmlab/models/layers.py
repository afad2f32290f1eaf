"""Layers that the transformer families share: linear, layer norm, embeddings, attention, feed-forward.

They are torch.nn's layers without the default initialisation, which every model here replaces (on GPT-3
shapes the default alone would take minutes).

Shapes: b batch, l length, d hidden width, h heads, k head width, f feed-forward width.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, AttentionMask, KVCache
from fmlab.models.functions import linear, look_up_and_lend


class Linear(nn.Linear):
    """nn.Linear, initialised by the model that owns it."""

    def reset_parameters(self) -> None:
        """Left to the model."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding, initialised by its model; a bad index raises ValueError with the legal range."""

    def reset_parameters(self) -> None:
        """Left to the model."""

    def forward(self, ids: Tensor) -> Tensor:
        with self._range_named(ids):
            return super().forward(ids)

    def lend(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """forward(ids), and the table for a tied output matrix (see look_up_and_lend)."""
        with self._range_named(ids):
            return look_up_and_lend(self.weight, ids)

    @contextmanager
    def _range_named(self, ids: Tensor) -> Iterator[None]:
        try:
            yield
        except IndexError as error:
            raise ValueError(
                f"an id is outside the embedding of {self.num_embeddings} rows: got {int(ids.min())}.."
                f"{int(ids.max())}, legal is 0..{self.num_embeddings - 1}; "
                "check that the tokenizer and the model have the same vocabulary"
            ) from error


class SelfAttention(nn.Module):
    """Multi-head self-attention, without its output bias.

    The bias of `output` is added by the layer, after the heads' partial sums: with the heads on several
    ranks, the sums must be added up first and the bias only once.
    """

    def __init__(self, hidden_size: int, head_size: int, core: AttentionCore, dropout: float = 0.0):
        super().__init__()
        self.head_size, self.core, self.dropout = head_size, core, dropout
        self.qkv = Linear(hidden_size, 3 * hidden_size)
        self.output = Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, mask: AttentionMask, cache: KVCache | None, index: int) -> Tensor:
        b, length, _ = x.shape
        # Heads are read from the weights: they may be a rank's share. Taken apart along dim 2, the three
        # gradients are put together again in one copy; a permute first would cost a second one.
        parts = self.qkv(x).view(b, length, 3, -1, self.head_size).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)  # [b,h,l,k]
        if cache is not None:
            key, value = cache.extend(index, key, value)
        mixed = self.core(query, key, value, mask, self.dropout if self.training else 0.0)
        return linear(mixed.transpose(1, 2).reshape(b, length, -1), self.output.weight)


class MLP(nn.Module):
    """down(gelu(up(x))) without the bias of `down`, which the layer adds (see SelfAttention)."""

    def __init__(self, hidden_size: int, ffn_size: int):
        super().__init__()
        self.up = Linear(hidden_size, ffn_size)
        self.down = Linear(ffn_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.gelu(self.up(x), approximate="tanh"), self.down.weight)


def add_residual(hidden: Tensor, update: Tensor, bias: Tensor, dropout: float = 0.0) -> Tensor:
    """hidden + dropout(update + bias)."""
    if dropout:
        return hidden + F.dropout(update + bias, dropout)
    return (hidden + update).add_(bias)  # in place: one new tensor instead of two
