"""What attention costs, predicted from shapes and measured: operations, memory of training, bytes of a cache.

Shapes: b batch, h query heads, g key/value heads, q queries, s keys, k head width.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from fmlab.meter import peak_memory, saved_activations
from fmlab.models.attention.core import AttentionCore
from fmlab.models.attention.mask import AttentionMask

Convention = Literal["full", "visible"]


def visible_pairs(queries: int, keys: int, causal: bool, window: int | None = None) -> int:
    """How many pairs a mask without padding allows; see AttentionMask for what causal and window mean."""
    reach = keys if window is None else window
    positions = range(keys - queries, keys)
    behind = sum(min(reach, p + 1) for p in positions)  # the query's own key included
    if causal:
        return behind
    if window is None:
        return queries * keys
    return behind + sum(min(reach - 1, keys - 1 - p) for p in positions)


def tiled_pairs(mask: AttentionMask, size: int) -> int:
    """How many pairs a core computes that works by tiles of `size` and skips those that hide everything."""
    return sum(
        (rows.stop - rows.start) * (columns.stop - columns.start)
        for rows, tiles in mask.tiles(size)
        for columns in tiles
    )


def attention_flops(
    queries: int,
    keys: int,
    heads: int,
    head_size: int,
    convention: Convention,
    *,
    causal: bool = True,
    window: int | None = None,
) -> int:
    """Floating point operations of one layer's forward pass and one row: scores and mixture, 4 k a pair.

    Args:
        heads: query heads. Key/value heads make no difference here: sharing them saves projections and
            memory, not scores.
        convention: "full" counts every pair, as most published figures do; "visible" those the mask allows,
            of which a window has at most `window` a query.
    """
    if convention not in ("full", "visible"):
        raise ValueError(f'convention must be "full" or "visible", got {convention!r}')
    pairs = queries * keys if convention == "full" else visible_pairs(queries, keys, causal, window)
    return 4 * heads * head_size * pairs


def kv_cache_bytes(
    tokens: int, layers: int, kv_heads: int, head_size: int, itemsize: int = 2, window: int | None = None
) -> int:
    """Bytes of the keys and values of one row; with a window the window - 1 tokens before the next one."""
    kept = tokens if window is None else min(tokens, window - 1)
    return 2 * layers * kv_heads * head_size * kept * itemsize


def latent_cache_bytes(tokens: int, layers: int, latent: int, rotary: int, itemsize: int = 2) -> int:
    """Bytes that multi-head latent attention keeps of one row: a latent vector and one rotary key a token.

    DeepSeek-V2 (2024, arXiv:2405.04434, section 2.1) has latent 512 and rotary 64, for 128 heads.
    """
    return layers * (latent + rotary) * tokens * itemsize


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes, measured: what autograd keeps for the backward pass, and the most alive at once in a step."""

    saved: int
    peak: int


def measure_memory(
    core: AttentionCore,
    mask: AttentionMask,
    heads: int = 8,
    head_size: int = 64,
    kv_heads: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> AttentionMemory:
    """Bytes that a forward and a backward pass of `core` take beyond queries, keys and values, on the CPU.

    What a fused kernel allocates inside one operator is not seen (see fmlab.meter.peak_memory).
    """
    shapes = [(heads, mask.queries)] + 2 * [(heads if kv_heads is None else kv_heads, mask.keys)]
    query, key, value = (torch.randn(batch, *shape, head_size, dtype=dtype) for shape in shapes)
    tensors = [x.requires_grad_() for x in (query, key, value)]
    with peak_memory() as memory, saved_activations() as activations:
        core(tensors[0], tensors[1], tensors[2], mask).sum().backward()
    return AttentionMemory(activations.peak, memory.peak)
