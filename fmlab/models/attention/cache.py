"""The keys and values that a generation keeps."""

from collections.abc import Callable

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer for the tokens seen so far, in buffers allocated once.

    Left padding is remembered: `attention_mask` describes only the new tokens of each call.

    Args:
        layers, batch, heads, max_length, head_size: the shape of the buffers, 2 * [layers,b,h,max_length,k].
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
        shape = (layers, batch, heads, max_length, head_size)
        self.key = torch.empty(shape, dtype=dtype, device=device)
        self.value = torch.empty(shape, dtype=dtype, device=device)
        self.real = torch.ones(batch, max_length, dtype=torch.bool, device=device)  # False where padded
        self.padded = False
        self.length = 0  # tokens in the cache, padding included
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}  # of each cross-attention layer
        self.source: dict[str, Tensor] = {}  # by their names in the State: the other stream and its mask

    @property
    def batch(self) -> int:
        return self.key.shape[1]

    @property
    def max_length(self) -> int:
        return self.key.shape[3]

    def begin(self, new: int, attention_mask: Tensor | None) -> Tensor:
        """Make room for `new` tokens and note their padding; the number of real tokens before them, [b]."""
        if self.length + new > self.max_length:
            raise ValueError(
                f"the cache holds {self.length} of at most {self.max_length} tokens and cannot take "
                f"{new} more; ask new_cache for a larger max_length"
            )
        before = self.real[:, : self.length].sum(-1)
        if attention_mask is not None:
            self.real[:, self.length : self.length + new] = attention_mask.bool()
            self.padded = True
        return before

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values [b,h,l,k]; all of that layer's so far, [b,h,s,k]."""
        end = self.length + key.shape[2]
        self.key[layer, :, :, self.length : end] = key
        self.value[layer, :, :, self.length : end] = value
        return self.key[layer, :, :, :end], self.value[layer, :, :, :end]

    def finish(self, new: int) -> None:
        """Count the `new` tokens in, once every layer has stored them."""
        self.length += new

    def remembered(self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of the other stream in a cross-attention layer: made once, then kept."""
        if layer not in self.memory:
            self.memory[layer] = make()
        return self.memory[layer]
