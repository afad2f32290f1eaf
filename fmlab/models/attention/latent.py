"""Multi-head latent attention: keys and values of all heads from one short vector per token.

DeepSeek-V2 (2024, arXiv:2405.04434, section 2.1). A token's keys and values are up-projections of a latent
vector, and the latent is what a cache keeps. Rotary positions would stand between the latent and the keys, so
they get a few extra dims of their own, with one key for all heads ("decoupled RoPE", section 2.1.3).

Two forms of the same sums:

- plain: make the keys and values of all heads from the latents, then attend. Best with many queries.
- absorbed: carry each query over to the latent's space and attend to the latents themselves, as in
  multi-query attention with one wide head; the values are up-projected after mixing. Best when decoding: it
  never makes the keys and values of the tokens before.

Shapes: b batch, l length, s cached and new tokens, d hidden width, h heads, n width of a head without
position, r width of the rotary part, v width of a value, c width of the latent.
"""

import torch
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, AttentionMask, KVCache, sdpa_core
from fmlab.models.attention.rotary import Rotary, YarnScaling, rotate, yarn_mscale
from fmlab.models.layers import Linear, RMSNorm


class LatentCache(KVCache):
    """One buffer [layers,b,1,max_length,c+r] of latents and turned rotary keys, c + r numbers a token.

    Keys and values of h heads would be h * (n + r + v) numbers.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        max_length: int,
        latent_size: int,
        rope_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(layers, batch, 1, max_length, latent_size + rope_size, dtype, device)
        self.latent_size = latent_size
        self.value = self.key[..., :latent_size]  # a view: the latents are keys and values at once

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new latents with their rotary keys, [b,1,l,c+r]; `value` is a part of `key`."""
        end = self.length + key.shape[2]
        self.key[layer, :, :, self.length : end] = key
        return self.key[layer, :, :, :end], self.value[layer, :, :, :end]

    def select(self, rows: Tensor) -> None:
        """Keep rows `rows` [n] of the batch, in this order."""
        super().select(rows)
        self.value = self.key[..., : self.latent_size]


class LatentAttention(nn.Module):
    """Multi-head latent attention of a stream to itself, without biases.

    Args:
        query_rank: width of the queries' own latent; None for one matrix (DeepSeek-V2-Lite).
        latent_size, nope_size, rope_size, value_size: c, n, r, v of the module's docstring.
        rotary: of head width `rope_size`. With YaRN's mscale_all_dim the products are scaled up by its
            square, as in DeepSeek's code.
        interleaved: how the rows of the weights pair up, see fmlab.models.attention.rotary; DeepSeek's do.

    Raises ValueError if `rotary` is for another width.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        query_rank: int | None,
        latent_size: int,
        nope_size: int,
        rope_size: int,
        value_size: int,
        rotary: Rotary,
        core: AttentionCore = sdpa_core,
        dropout: float = 0.0,
        *,
        norm_eps: float = 1e-6,
        interleaved: bool = True,
    ):
        super().__init__()
        if rotary.head_size != rope_size:
            raise ValueError(f"rotary is for a width of {rotary.head_size}, but rope_size is {rope_size}")
        self.latent_size, self.nope_size = latent_size, nope_size
        self.rope_size, self.value_size = rope_size, value_size
        self.rotary, self.core, self.dropout, self.interleaved = rotary, core, dropout, interleaved
        self.scale = (nope_size + rope_size) ** -0.5
        if isinstance(rotary.scaling, YarnScaling) and rotary.scaling.mscale_all_dim:
            self.scale *= yarn_mscale(rotary.scaling.factor, rotary.scaling.mscale_all_dim) ** 2
        if query_rank is not None:
            self.query_down = Linear(hidden_size, query_rank, bias=False)
            self.query_norm = RMSNorm(query_rank, norm_eps)
        self.query = Linear(query_rank or hidden_size, heads * (nope_size + rope_size), bias=False)
        self.latent_down = Linear(hidden_size, latent_size + rope_size, bias=False)
        self.latent_norm = RMSNorm(latent_size, norm_eps)
        self.key_value = Linear(latent_size, heads * (nope_size + value_size), bias=False)  # per head: n, v
        self.output = Linear(heads * value_size, hidden_size, bias=False)
        self.low_rank_queries = query_rank is not None

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        mask: AttentionMask,
        cache: LatentCache | None = None,
        index: int = 0,
        *,
        absorbed: bool | None = None,
    ) -> Tensor:
        """x [b,l,d], position_ids [b,l] -> [b,l,d].

        Args:
            cache: of latents; `index` is our layer in it.
            absorbed: which of the two forms; None for absorbed when the cache holds tokens before these.
        """
        cos, sin = self.rotary(position_ids, None if cache is None else cache.max_length)
        queries = self.query_norm(self.query_down(x)) if self.low_rank_queries else x
        query = self.query(queries).view(*x.shape[:2], -1, self.nope_size + self.rope_size).transpose(1, 2)
        plain_bhln, turned_bhlr = query.split([self.nope_size, self.rope_size], -1)
        turned_bhlr = rotate(turned_bhlr, cos, sin, self.interleaved)

        latent_blc, rope_blr = self.latent_down(x).split([self.latent_size, self.rope_size], -1)
        key_b1lr = rotate(rope_blr[:, None], cos, sin, self.interleaved)
        entry = torch.cat([self.latent_norm(latent_blc)[:, None], key_b1lr], -1)  # [b,1,l,c+r]
        if absorbed is None:
            absorbed = cache is not None and cache.length > 0
        if cache is not None:
            entry, _ = cache.extend(index, entry, entry[..., : self.latent_size])

        attend = self._absorbed if absorbed else self._plain
        mixed_bhlv = attend(plain_bhln, turned_bhlr, entry, mask)
        return self.output.product(mixed_bhlv.transpose(1, 2).reshape(*x.shape[:2], -1))

    def _plain(self, plain: Tensor, turned: Tensor, entry: Tensor, mask: AttentionMask) -> Tensor:
        latent_bsc, rope_b1sr = entry[:, 0, :, : self.latent_size], entry[..., self.latent_size :]
        both = self.key_value(latent_bsc).unflatten(-1, (-1, self.nope_size + self.value_size))
        key_bhsn, value_bhsv = both.transpose(1, 2).split([self.nope_size, self.value_size], -1)
        key = torch.cat([key_bhsn, rope_b1sr.expand(-1, key_bhsn.shape[1], -1, -1)], -1)
        return self._core(torch.cat([plain, turned], -1), key, value_bhsv, mask)

    def _absorbed(self, plain: Tensor, turned: Tensor, entry: Tensor, mask: AttentionMask) -> Tensor:
        # heads are read from the weight: they may be a rank's share
        weight_hoc = self.key_value.weight.unflatten(0, (-1, self.nope_size + self.value_size))
        to_key_hnc, to_value_hvc = weight_hoc.split([self.nope_size, self.value_size], 1)
        query_bhlc = plain @ to_key_hnc  # q . (W c) = (W^T q) . c
        query = torch.cat([query_bhlc, turned.to(query_bhlc.dtype)], -1)
        mixed_bhlc = self._core(query, entry, entry[..., : self.latent_size], mask)
        return mixed_bhlc @ to_value_hvc.mT

    def _core(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        dtype = query.dtype  # a cache, or a part turned in another dtype than autocast's, may differ
        return self.core(query, key.to(dtype), value.to(dtype), mask, dropout, scale=self.scale)
