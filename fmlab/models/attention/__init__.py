"""Attention: who may look at whom, the core that mixes the values, the cache of keys and values."""

from fmlab.models.attention.cache import KVCache
from fmlab.models.attention.core import AttentionCore, sdpa_core
from fmlab.models.attention.mask import (
    AttentionMask,
    bidirectional_mask,
    causal_mask,
    cross_mask,
    document_runs,
    token_positions,
)

__all__ = [
    "AttentionCore",
    "AttentionMask",
    "KVCache",
    "bidirectional_mask",
    "causal_mask",
    "cross_mask",
    "document_runs",
    "sdpa_core",
    "token_positions",
]
