"""Layers that the transformer families share: linear, norms, embeddings, attention, feed-forward.

They are torch.nn's layers without the default initialisation, which every model here replaces (on GPT-3
shapes the default alone would take minutes).

Shapes: b batch, l length, m length of the other stream, d hidden width, h heads, g key/value heads, k head
width, f feed-forward width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, AttentionMask, KVCache
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.dropout import drop_out
from fmlab.models.functions import linear, look_up_and_lend, rms_norm


class Linear(nn.Linear):
    """nn.Linear, initialised by the model that owns it."""

    def reset_parameters(self) -> None:
        """Left to the model."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x @ weight.T, for a layer that adds the bias itself."""
        return linear(x, self.weight)

    def beside(self, other: "Linear", x: Tensor) -> tuple[Tensor, Tensor]:
        """This layer's output and that of `other`, of one input: divided over ranks, they share a message."""
        return self(x), other(x)


class Embedding(nn.Embedding):
    """nn.Embedding, initialised by its model; a bad index raises ValueError with the legal range."""

    def reset_parameters(self) -> None:
        """Left to the model."""

    def forward(self, ids: Tensor) -> Tensor:
        with self._range_named(ids):
            return super().forward(ids)

    def lend(self, ids: Tensor, lent: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """forward(ids), and the table for a tied output matrix (see look_up_and_lend).

        `lent` is this table as another embedding with the same one has lent it: T5 looks up twice.
        """
        with self._range_named(ids):
            return look_up_and_lend(self.weight if lent is None else lent, ids, self.padding_idx)

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


def can_lend(lender: nn.Module, borrower: nn.Module, cross_entropy: object) -> bool:
    """Whether an embedding may lend its table to the output layer, so that its two uses make one gradient.

    Only for our own embedding and loss: what replaces or hooks them sees the plain way.
    """
    if type(lender) is not Embedding or cross_entropy is not linear_cross_entropy:
        return False
    hooked = lender._forward_hooks or lender._forward_pre_hooks or torch.compiler.is_compiling()
    return not hooked and borrower.weight is lender.weight


# The two halves of a layer leave out the bias of their last matrix; the layer adds it. With the heads on
# several ranks the partial sums must be added up first, and the bias only once.


class SelfAttention(nn.Module):
    """Multi-head attention of a stream to itself, one matrix for queries, keys and values; no output bias.

    Args:
        heads: hidden_size // head_size if not given; T5 has heads that are together wider than the stream.
        output_bias: as `bias` if not given; Stable Diffusion has one there only.
        scale: of the products of queries and keys; None for 1 / sqrt(head_size).
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        core: AttentionCore,
        dropout: float = 0.0,
        *,
        heads: int | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        self.head_size, self.core, self.dropout, self.scale = head_size, core, dropout, scale
        width = hidden_size if heads is None else heads * head_size
        self.qkv = Linear(hidden_size, 3 * width, bias=bias)
        self.output = Linear(width, hidden_size, bias=bias if output_bias is None else output_bias)

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        cache: KVCache | None = None,
        index: int = 0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """x [b,l,d] -> [b,l,d]; `index`: which layer of the cache is ours; `bias`: see AttentionCore."""
        # Heads are read from the product: they may be a rank's share, and x its share of the positions. Taken
        # apart along dim 2, the three gradients are put together again in one copy; a permute first would
        # cost a second one.
        qkv = self.qkv(x)
        b, length, width = qkv.shape
        heads = width // (3 * self.head_size)
        parts = qkv.view(b, length, 3, heads, self.head_size).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)  # [b,h,l,k]
        if cache is not None:
            key, value = cache.extend(index, key, value)
        dropout = self.dropout if self.training else 0.0
        mixed = self.core(query, key, value, mask, dropout, scale=self.scale, bias=bias)
        return self.output.product(mixed.transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """Attention with its own matrix for queries; no output bias. Two uses:

    - to another stream, `memory` (cross-attention, as in T5's decoder and Stable Diffusion's UNet);
    - to itself with fewer key/value heads than query heads (grouped-query attention, Ainslie et al. 2023,
      arXiv:2305.13245; with one it is multi-query attention, Shazeer 2019, arXiv:1911.02150).
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        heads: int,
        core: AttentionCore,
        dropout: float = 0.0,
        *,
        kv_heads: int | None = None,
        memory_size: int | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_size, self.core, self.dropout, self.scale = head_size, core, dropout, scale
        self.query = Linear(hidden_size, heads * head_size, bias=bias)
        self.key_value = Linear(memory_size or hidden_size, 2 * kv_heads * head_size, bias=bias)
        self.output = Linear(
            heads * head_size, hidden_size, bias=bias if output_bias is None else output_bias
        )

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        cache: KVCache | None = None,
        index: int = 0,
        *,
        memory: Tensor | None = None,
        rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """x [b,l,d] -> [b,l,d].

        Args:
            memory: [b,m,d'], what to look at instead of `x`; with a cache it is read at the first call only.
            rotate: (query, key) -> (query, key), of the new tokens, before they enter the cache (rotary
                positions).
            bias: see AttentionCore.
        """
        if memory is not None:
            query, source = self._heads(self.query(x)), memory
            if cache is None:
                key, value = self._keys_and_values(source)
            else:
                key, value = cache.remembered(index, lambda: self._keys_and_values(source))
        else:
            query, key_value = self.query.beside(self.key_value, x)
            query, (key, value) = self._heads(query), self._apart(key_value)
            if rotate is not None:
                query, key = rotate(query, key)
            if cache is not None:
                key, value = cache.extend(index, key, value)
        dropout = self.dropout if self.training else 0.0
        mixed = self.core(query, key, value, mask, dropout, scale=self.scale, bias=bias)
        return self.output.product(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        heads = x.shape[-1] // self.head_size
        return x.view(*x.shape[:2], heads, self.head_size).transpose(1, 2)  # [b,h,l,k]

    def _keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self._apart(self.key_value(source))

    def _apart(self, key_value: Tensor) -> tuple[Tensor, Tensor]:
        heads = key_value.shape[-1] // (2 * self.head_size)
        parts = key_value.view(*key_value.shape[:2], 2, heads, self.head_size).unbind(2)
        return parts[0].transpose(1, 2), parts[1].transpose(1, 2)


Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, as GPT-2 and T5 v1.1 have it; 0.841192 at 1, where GELU is 0.841345."""
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """down(dropout(activation(up(x)))) without the bias of `down`."""

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: Activation = gelu_tanh,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.up = Linear(hidden_size, ffn_size, bias=bias)
        self.down = Linear(ffn_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed = drop_out(self.activation(self.up(x)), self.dropout, self.training, "bqf")
        return self.down.product(mixed)


class GatedMLP(nn.Module):
    """down(dropout(activation(gate(x)) * up(x))) without biases (Shazeer 2020, arXiv:2002.05202); gate above
    up in one matrix. With SiLU it is SwiGLU, with GELU GEGLU."""

    def __init__(
        self, hidden_size: int, ffn_size: int, activation: Activation = F.silu, dropout: float = 0.0
    ):
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.gate_up = Linear(hidden_size, 2 * ffn_size, bias=False)
        self.down = Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        mixed = drop_out(self.activation(gate) * up, self.dropout, self.training, "bqf")
        return self.down.product(mixed)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight (Zhang and Sennrich 2019, arXiv:1910.07467), the mean square in fp32 or wider."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype.itemsize >= 4:
            eager = x.device.type == "cpu" and not torch.compiler.is_compiling()
            if eager and x.dtype == self.weight.dtype and self.eps is not None:
                return rms_norm(x, self.weight, self.eps)
            return super().forward(x)
        # as T5 and Llama do it: normed in fp32, rounded, then weighted
        return F.rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype) * self.weight


def add_residual(hidden: Tensor, update: Tensor, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """hidden + dropout(update + bias)."""
    if dropout:
        return hidden + drop_out(update if bias is None else update + bias, dropout, True, "bld")
    total = hidden + update
    return total if bias is None else total.add_(bias)  # in place: one new tensor instead of two
