"""T5's relative positions: a learned number per head and bucket of distance, added to the scores.

Near distances have a bucket each, far ones share buckets that widen like a logarithm, and all from
`max_distance` on share the last one (Raffel et al. 2020, arXiv:1910.10683, section 2.1; the bucket formula is
that of the paper's code).

Shapes: h heads, q queries, s keys.
"""

import math

import torch
from torch import Tensor


def relative_position_bucket(
    distance: Tensor, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """Bucket, in 0..num_buckets-1, of each `distance` = position of the key - position of the query.

    Args:
        distance: whole numbers of any shape.
        bidirectional: half of the buckets for keys after the query (an encoder). False (a decoder): all of
            them for keys before it; a key after it is counted as at distance 0, where a causal mask hides it.

    Raises ValueError if there are too few buckets, or no distance is left for the logarithmic ones.
    """
    side = _buckets_of_a_side(bidirectional, num_buckets, max_distance)
    exact = side // 2  # distances 0..exact-1 have a bucket each
    far = distance.abs() if bidirectional else (-distance).clamp(min=0)
    # In fp32, as the published models were trained; log of what is near is not used.
    steps = torch.log(far.float() / exact) / math.log(max_distance / exact) * (side - exact)
    logarithmic = (exact + steps.clamp(min=0).long()).clamp(max=side - 1)
    bucket = torch.where(far < exact, far, logarithmic)
    return bucket + (distance > 0) * side if bidirectional else bucket


def _buckets_of_a_side(bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    sides = 2 if bidirectional else 1
    if num_buckets < 2 * sides or num_buckets % sides:
        raise ValueError(
            f"num_buckets={num_buckets} cannot be shared out; it must be "
            + ("even and at least 4" if bidirectional else "at least 2")
        )
    side = num_buckets // sides
    if max_distance <= side // 2:
        raise ValueError(
            f"max_distance={max_distance} leaves nothing to the logarithmic buckets: the nearest "
            f"{side // 2} distances have buckets of their own; give more than {side // 2}"
        )
    return side


def relative_buckets(
    queries: int,
    keys: int,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
    device: torch.device | str | None = None,
) -> Tensor:
    """Bucket of each pair, int64 [q,s]; with more keys than queries (a cache) aligned at the end."""
    query = torch.arange(keys - queries, keys, device=device)
    distance = torch.arange(keys, device=device) - query[:, None]
    return relative_position_bucket(distance, bidirectional, num_buckets, max_distance)


def t5_bias(
    table: Tensor, queries: int, keys: int, bidirectional: bool = True, max_distance: int = 128
) -> Tensor:
    """The bias of an attention core, [1,h,q,s], from the learned `table` [num_buckets,h]; differentiable.

    A row of it is the row below moved by one: all are windows of one list by distance, s + q - 1 long.
    """
    distance = torch.arange(1 - keys, queries, device=table.device)
    bucket = relative_position_bucket(distance, bidirectional, len(table), max_distance)
    windows_hqs = table[bucket].T.unfold(-1, keys, 1)  # that of the last query first
    return windows_hqs.flip(1)[None]
