"""Prefix tuning (Li and Liang 2021, arXiv:2101.00190): trained keys and values before those of every layer.

A frozen decoder attends to p positions more in each layer, whose keys and values learn. They go in where
attention mixes the values, so that the model has not to know of them. The paper trains them through a wide
network that is thrown away afterwards, to steady the training (section 4.3); here they are trained directly
and start as the keys and values of real tokens, which does the same (section 7.4).

Shapes: b batch, h heads, g key/value heads, q queries, s keys, p prefix, k head width, l length.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models import State
from fmlab.models.attention import AttentionCore, AttentionMask, KVCache
from fmlab.train.adapt import freeze, only_train
from fmlab.train.adapt_prompt import Prefixed, start_ids


class PrefixCore(nn.Module):
    """An attention core with p keys and values of its own before those it is given."""

    def __init__(self, core: AttentionCore, key_gpk: Tensor, value_gpk: Tensor):
        super().__init__()
        self.core, self.key, self.value = core, nn.Parameter(key_gpk), nn.Parameter(value_gpk)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        dropout: float = 0.0,
        *,
        scale: float | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See AttentionCore."""
        length = self.key.shape[1]
        key, value = (
            torch.cat([mine.to(theirs).expand(len(theirs), -1, -1, -1), theirs], 2)
            for mine, theirs in ((self.key, key), (self.value, value))
        )
        if bias is not None:
            bias = F.pad(bias, (length, 0))
        mixed: Tensor = self.core(query, key, value, behind(mask, length), dropout, scale=scale, bias=bias)
        return mixed


def behind(mask: AttentionMask, length: int) -> AttentionMask:
    """The mask with `length` more keys before all others, which every query sees.

    Raises ValueError for masks of packed documents and of blocks.
    """
    if mask.query_documents is not None or mask.blocks is not None:
        raise ValueError(
            "a prefix before packed documents or block patterns is not supported; use rows of one"
        )
    real = None if mask.real_keys is None else F.pad(mask.real_keys, (length, 0), value=True)
    prefix = None if mask.prefix is None else mask.prefix + length
    if prefix is None and mask.window is not None:
        prefix = torch.full((1,), length)  # the window alone would hide it
    return AttentionMask(
        mask.causal, mask.queries, mask.keys + length, real, window=mask.window, prefix=prefix
    )


class PrefixTuned(Prefixed):
    """A decoder with trained keys and values in every layer. The decoder is frozen and changed in place.

    Args:
        length: of the prefix (the paper's best are 10 for tables to text, 200 for summaries).
        start: token ids, `length` of them, whose keys and values the prefix begins as: then it starts as if
            these tokens stood there. By default drawn from the vocabulary with `seed`.

    The text stands at positions from `length` on, behind the prefix.
    """

    def __init__(self, model: Any, length: int = 10, start: Sequence[int] | None = None, seed: int = 0):
        super().__init__(model, length)
        layers = [m for m in model.modules() if hasattr(m, "core") and hasattr(m, "head_size")]
        if any(isinstance(layer.core, PrefixCore) for layer in layers):
            raise ValueError("the decoder has a prefix already; remove() that first")
        ids = start_ids(start, length, model.config.vocab_size, seed)
        freeze(model)
        cache = read(model, ids)
        self.layers = [layers]  # in a list: not modules of ours
        for index, layer in enumerate(layers):
            core = layer.core
            key, value = (buffer[index, 0, :, :length].clone() for buffer in (cache.key, cache.value))
            layer.core = PrefixCore(core, key, value)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
    ) -> State:
        """As the decoder's, without packing."""
        self._check(input_ids, document_ids, 0 if cache is None else cache.length)
        if position_ids is None:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
            past = torch.zeros(len(input_ids), 1, dtype=torch.long, device=input_ids.device)
            if cache is not None:
                past = cache.real[:, : cache.length].sum(-1, keepdim=True)
            position_ids = (real.cumsum(-1) - 1).clamp(min=0) + past
        state: State = self.model(
            input_ids, labels, attention_mask, None, position_ids + self.length, cache, last=last
        )
        return state

    def new_cache(self, batch: int, max_length: int | None = None) -> KVCache:
        """An empty cache for `batch` rows of up to `max_length` tokens: the prefix is not in it."""
        cache: KVCache = self.model.new_cache(batch, max_length)
        return cache

    def remove(self) -> Any:
        for layer in self.layers[0]:
            core = layer.core.core
            del layer.core
            layer.core = core
        only_train(self.model)
        return self.model


@torch.no_grad()
def read(model: Any, ids: Tensor) -> KVCache:
    """The model's cache after reading these tokens [p]."""
    training = model.training
    model.eval()
    cache: KVCache = model.new_cache(1, len(ids))
    model(ids.to(next(model.parameters()).device)[None], cache=cache)
    model.train(training)
    return cache
