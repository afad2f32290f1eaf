"""Masks made of any combination of parts, for property tests."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from fmlab.models.attention import AttentionMask, BlockPattern, random_blocks


@st.composite
def masks(draw: st.DrawFn) -> AttentionMask:
    """Any combination of the parts, with and without keys of a cache before the queries."""
    queries, past, batch = draw(st.integers(1, 9)), draw(st.integers(0, 7)), draw(st.integers(1, 3))
    keys = queries + past

    def rows(length: int, most: int) -> Tensor:
        numbers = st.lists(st.integers(0, most), min_size=length, max_size=length)
        return torch.tensor([draw(numbers) for _ in range(batch)])

    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, keys + 1))
    size = draw(st.integers(1, 4))
    n = -(-keys // size)
    blocks = draw(st.none() | st.just(BlockPattern(random_blocks(n, draw(st.integers(0, n))), size)))
    hides = causal or window is not None or blocks is not None
    documents = draw(st.booleans())
    key_documents = rows(keys, 1).cumsum(-1)
    return AttentionMask(
        causal,
        queries,
        keys,
        real_keys=rows(keys, 1).bool() if draw(st.booleans()) else None,
        query_documents=key_documents[:, past:] if documents else None,
        key_documents=key_documents if documents else None,
        window=window,
        prefix=rows(1, keys)[:, 0] if hides and draw(st.booleans()) else None,
        blocks=blocks,
    )
