"""Attention: who may look at whom, the core that mixes the values, the cache of keys and values."""

from fmlab.models.attention.alibi import alibi_bias, alibi_slopes
from fmlab.models.attention.block_sparse import (
    BlockPattern,
    global_blocks,
    local_blocks,
    random_blocks,
    strided_blocks,
)
from fmlab.models.attention.cache import GrowingKVCache, KVCache, WindowKVCache
from fmlab.models.attention.core import AttentionCore, sdpa_core
from fmlab.models.attention.definition import definition_core, quadratic_core
from fmlab.models.attention.fixed import FixedKVCache
from fmlab.models.attention.flash import flash_core
from fmlab.models.attention.flex import flex_core
from fmlab.models.attention.linear import LinearState, linear_core, linear_definition
from fmlab.models.attention.mask import (
    AttentionMask,
    bidirectional_mask,
    causal_mask,
    cross_mask,
    document_runs,
    token_positions,
)
from fmlab.models.attention.sinusoidal import sinusoidal_positions
from fmlab.models.attention.t5_buckets import relative_buckets, relative_position_bucket, t5_bias

__all__ = [
    "AttentionCore",
    "AttentionMask",
    "BlockPattern",
    "FixedKVCache",
    "GrowingKVCache",
    "KVCache",
    "LinearState",
    "WindowKVCache",
    "alibi_bias",
    "alibi_slopes",
    "bidirectional_mask",
    "causal_mask",
    "cross_mask",
    "definition_core",
    "document_runs",
    "flash_core",
    "flex_core",
    "global_blocks",
    "linear_core",
    "linear_definition",
    "local_blocks",
    "quadratic_core",
    "random_blocks",
    "relative_buckets",
    "relative_position_bucket",
    "sdpa_core",
    "sinusoidal_positions",
    "strided_blocks",
    "t5_bias",
    "token_positions",
]
