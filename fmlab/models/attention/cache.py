"""The keys and values that a generation keeps."""

from collections.abc import Callable

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer for the tokens seen so far, in buffers allocated once (a static cache).

    Left padding is remembered: `attention_mask` describes only the new tokens of each call.

    Args:
        layers, batch, heads, max_length, head_size: the shape of the buffers, 2 * [layers,b,h,max_length,k].
    """

    #: How many tokens back, itself included, a query still finds keys; None for all.
    window: int | None = None

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

    @property
    def text_length(self) -> int | None:
        """Tokens of the text that the cache was made for; None if it does not say."""
        return self.max_length

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of keys and values."""
        return self.key.nbytes + self.value.nbytes

    def keys(self, new: int) -> int:
        """How many keys the queries of `new` tokens meet, their own included."""
        return self.length + new

    def real_keys(self, new: int) -> Tensor | None:
        """Which of those keys are real, bool [b,s], or None if none is padding; after `begin`."""
        return self.real[:, : self.length + new] if self.padded else None

    def begin(self, new: int, attention_mask: Tensor | None) -> Tensor:
        """Make room for `new` tokens and note their padding; the number of real tokens before them, [b]."""
        if self.length + new > self.max_length:
            raise ValueError(
                f"the cache holds {self.length} of at most {self.max_length} tokens and cannot take "
                f"{new} more; ask new_cache for a larger max_length"
            )
        before = self.real[:, : self.length].sum(-1)
        # Set without a mask, too: a call that failed may have left its padding there.
        real = True if attention_mask is None else attention_mask.bool()
        if attention_mask is not None or self.padded:
            self.real[:, self.length : self.length + new] = real
        self.padded = self.padded or attention_mask is not None
        return before

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values [b,h,l,k]; all of that layer's so far, [b,h,s,k]."""
        self._check(layer, key)
        end = self.length + key.shape[2]
        self.key[layer, :, :, self.length : end] = key
        self.value[layer, :, :, self.length : end] = value
        return self.key[layer, :, :, :end], self.value[layer, :, :, :end]

    def _check(self, layer: int, key: Tensor) -> None:
        """Raise ValueError unless keys [b,h,l,k] of this layer are of the kind that the cache is for."""
        layers, _, heads, _, size = self.key.shape
        other = layer >= layers or (heads, size) != (key.shape[1], key.shape[3])
        if other or key.dtype.itemsize > self.key.dtype.itemsize:
            raise ValueError(
                f"the cache is for {layers} layers of {heads} heads of {size} in {self.key.dtype}, and layer "
                f"{layer} of the model has {key.shape[1]} of {key.shape[3]} in {key.dtype}; make it with the "
                "model's new_cache"
            )

    def finish(self, new: int) -> None:
        """Count the `new` tokens in, once every layer has stored them."""
        self.length += new

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on, as after a draft that was turned down."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens and cannot be cut to {length}")
        self.real[:, length : self.length] = True
        self.length = length

    def select(self, rows: Tensor) -> None:
        """Keep rows `rows` [n] of the batch, in this order; a row may come several times (beams)."""
        self.key, self.value = self.key.index_select(1, rows), self.value.index_select(1, rows)
        self.real = self.real.index_select(0, rows)
        self.memory = {
            i: (k.index_select(0, rows), v.index_select(0, rows)) for i, (k, v) in self.memory.items()
        }
        self.source = {name: tensor.index_select(0, rows) for name, tensor in self.source.items()}

    def remembered(self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of the other stream in a cross-attention layer: made once, then kept."""
        if layer not in self.memory:
            self.memory[layer] = make()
        return self.memory[layer]


class GrowingKVCache(KVCache):
    """A cache without a largest length: when it is full, buffers of twice the size take its place.

    Each token is then copied once on average. A static cache needs no copy and keeps its addresses, which
    compiled steps and accelerators want.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        start: int = 64,
    ):
        if start < 1:
            raise ValueError(f"start must be at least 1 token, got {start}")
        super().__init__(layers, batch, heads, start, head_size, dtype, device)

    @property
    def text_length(self) -> int | None:
        return None

    def begin(self, new: int, attention_mask: Tensor | None) -> Tensor:
        """As KVCache.begin, but never out of room."""
        if self.length + new > self.max_length:
            room = max(2 * self.max_length, self.length + new)
            self.key, self.value = (self._larger(buffer, room) for buffer in (self.key, self.value))
            real = self.real.new_ones(self.batch, room)
            real[:, : self.length] = self.real[:, : self.length]
            self.real = real
        return super().begin(new, attention_mask)

    def _larger(self, buffer: Tensor, room: int) -> Tensor:
        larger = buffer.new_empty(*buffer.shape[:3], room, buffer.shape[4])
        larger[:, :, :, : self.length] = buffer[:, :, :, : self.length]
        return larger


class WindowKVCache(KVCache):
    """A cache for layers that look back `window` tokens: it keeps the window - 1 before the next one.

    The kept tokens stay in order, the oldest first: masks and relative positions count from the end as with
    any other cache. A ring would save the shift, but hand keys to attention out of order.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        window: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if window < 1:
            raise ValueError(f"window must be at least 1 (a token sees itself), got {window}")
        super().__init__(layers, batch, heads, window - 1, head_size, dtype, device)
        self.window = window
        self.seen = torch.zeros(batch, dtype=torch.long, device=device)  # real tokens so far, kept or not
        self.current = self.real[:, :0]  # which keys of the call in progress are real, [b,s]
        self.pushed: dict[int, tuple[Tensor, Tensor]] = {}  # what its layers leave, kept when it has finished

    @property
    def text_length(self) -> int | None:
        return None

    @property
    def kept(self) -> int:
        """Tokens in the buffers, at their end."""
        return min(self.length, self.max_length)

    def keys(self, new: int) -> int:
        return self.kept + new

    def real_keys(self, new: int) -> Tensor | None:
        return self.current if self.padded else None

    def begin(self, new: int, attention_mask: Tensor | None) -> Tensor:
        """Note the padding of `new` tokens; the number of real tokens before them, [b]."""
        self.pushed = {}
        real = self.real.new_ones(self.batch, new) if attention_mask is None else attention_mask.bool()
        self.padded = self.padded or attention_mask is not None
        self.current = torch.cat([self.real[:, self.max_length - self.kept :], real], 1)
        return self.seen.clone()

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The kept keys and values and the new ones after them, [b,h,s,k]; the last of them are kept."""
        self._check(layer, key)
        kept = self.max_length - self.kept
        joined = tuple(
            torch.cat([buffer[layer, :, :, kept:], added.to(buffer.dtype)], 2)
            for buffer, added in ((self.key, key), (self.value, value))
        )
        # copies of the window alone: what came before it need not be kept until all layers are through
        rest = max(0, joined[0].shape[2] - self.max_length)
        self.pushed[layer] = joined[0][:, :, rest:].clone(), joined[1][:, :, rest:].clone()
        return joined[0], joined[1]

    def finish(self, new: int) -> None:
        keep = min(self.current.shape[1], self.max_length)
        for layer, window in self.pushed.items():
            for buffer, part in zip((self.key, self.value), window, strict=True):
                buffer[layer, :, :, self.max_length - keep :] = part
        self.pushed = {}
        self.real[:, self.max_length - keep :] = self.current[:, self.current.shape[1] - keep :]
        self.seen += self.current[:, self.current.shape[1] - new :].sum(1)
        super().finish(new)

    def crop(self, length: int) -> None:
        """Refused: the tokens that would come back into the window are gone."""
        raise ValueError("a cache that keeps only a window cannot go back; use a KVCache to try tokens out")

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.seen, self.current = self.seen.index_select(0, rows), self.current.index_select(0, rows)
