"""A cache that shows attention the same shapes at every token: what a static-shape compiler wants.

Shapes: b batch, h heads, l new tokens, m most tokens, k head width.
"""

import torch
from torch import Tensor

from fmlab.models.attention.cache import KVCache


class FixedKVCache(KVCache):
    """Keys and values in whole buffers, the empty places hidden by the mask.

    `KVCache` hands out the tokens that it holds, one more at each step: on a TPU or Trainium each step is
    then another program to compile. Here every step after the prompt meets all `max_length` keys, and where
    the new token goes is a number on the device, not a constant of the program. One program reads the prompt,
    one writes all tokens. It costs the empty keys: pick max_length no larger than needed.

    After the prompt it takes one token of each row at a time. For layers that see positions only in
    `position_ids` and the mask (GPT, Llama, Mixtral), not in a bias by distance (T5, ALiBi).
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        max_length: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(layers, batch, heads, max_length, head_size, dtype, device)
        self.key.zero_()  # hidden numbers are multiplied by zero, which a NaN survives
        self.value.zero_()
        self.real.zero_()
        self.padded = True  # which keys are real always has to be told
        self.at = torch.zeros(1, dtype=torch.long, device=device)  # where the next token goes

    @classmethod
    def like(cls, cache: KVCache) -> "FixedKVCache":
        """An empty cache of the shape of one that a model's `new_cache` gave.

        Raises ValueError for a cache of another kind, whose layers need more than keys and values.
        """
        if type(cache) is not KVCache:
            raise ValueError(
                f"static shapes need a plain key/value cache, and this model has a {type(cache).__name__}"
            )
        layers, batch, heads, most, size = cache.key.shape
        return cls(layers, batch, heads, most, size, cache.key.dtype, cache.key.device)

    def keys(self, new: int) -> int:
        return new if self.length == 0 else self.max_length

    def real_keys(self, new: int) -> Tensor | None:
        return self.real[:, :new] if self.length == 0 else self.real

    def begin(self, new: int, attention_mask: Tensor | None) -> Tensor:
        """As KVCache.begin. Raises ValueError for several tokens a row behind the first call."""
        if self.length and new != 1:
            raise ValueError(
                f"a cache of fixed shapes reads one token a row after the prompt, got {new}; "
                "use a KVCache (static_shapes=False)"
            )
        if self.length + new > self.max_length:
            return super().begin(new, attention_mask)  # raises
        before = self.real.sum(-1)
        if self.length == 0:
            self.real.zero_()  # a call that failed may have left its padding there
            self.real[:, :new] = True if attention_mask is None else attention_mask.bool()
        elif attention_mask is None:
            self.real.index_fill_(1, self.at, True)
        else:
            self.real.index_copy_(1, self.at, attention_mask.bool())
        return before

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._check(layer, key)
        new = key.shape[2]
        if self.length == 0:
            self.key[layer, :, :, :new], self.value[layer, :, :, :new] = key, value
            return self.key[layer, :, :, :new], self.value[layer, :, :, :new]
        self.key[layer].index_copy_(2, self.at, key.to(self.key.dtype))
        self.value[layer].index_copy_(2, self.at, value.to(self.value.dtype))
        return self.key[layer], self.value[layer]

    def finish(self, new: int) -> None:
        super().finish(new)
        self.at += new

    def crop(self, length: int) -> None:
        super().crop(length)
        self.real[:, length:] = False
        self.at.fill_(length)
