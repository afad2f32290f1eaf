"""Every mask against a double loop over queries and keys, and its dense and tiled forms against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.models.attention import (
    AttentionMask,
    BlockPattern,
    GrowingKVCache,
    KVCache,
    WindowKVCache,
    bidirectional_mask,
    causal_mask,
    global_blocks,
    local_blocks,
    random_blocks,
    strided_blocks,
)
from fmlab.models.state import State
from tests.models.attention.masks import masks

CPU = torch.device("cpu")


def may_look(mask: AttentionMask, row: int, i: int, j: int) -> bool:
    """The definition, for one query and one key."""
    p = mask.keys - mask.queries + i
    sees = not mask.causal or j <= p
    sees = sees and (mask.window is None or abs(p - j) < mask.window)
    if mask.blocks is not None:
        sees = sees and bool(mask.blocks.layout[p // mask.blocks.size, j // mask.blocks.size])
    if mask.prefix is not None:
        sees = sees or j < int(mask.prefix[row])
    if mask.real_keys is not None:
        sees = sees and bool(mask.real_keys[row, j])
    if mask.query_documents is not None and mask.key_documents is not None:
        sees = sees and int(mask.query_documents[row, i]) == int(mask.key_documents[row, j])
    return sees


def tiles_of(mask: AttentionMask, size: int) -> list[tuple[slice, slice]]:
    return [(rows, columns) for rows, tiles in mask.tiles(size) for columns in tiles]


@settings(max_examples=150, deadline=None)
@given(masks(), st.integers(1, 5))
def test_a_mask_is_its_double_loop(mask: AttentionMask, size: int) -> None:
    allowed = mask.allowed(CPU)[:, 0]
    for row in range(len(allowed)):
        pairs = [[may_look(mask, row, i, j) for j in range(mask.keys)] for i in range(mask.queries)]
        assert allowed[row].tolist() == pairs
    assert torch.equal(mask.blind(CPU)[:, 0, :, 0], ~allowed.any(-1))

    # The tiles hold every allowed pair once, and a tile called whole hides nothing.
    tiled = torch.zeros_like(allowed, dtype=torch.int)
    for rows, columns in tiles_of(mask, size):
        tile = mask.tile(rows, columns, CPU)[:, 0]
        assert not mask.whole(rows, columns) or tile.all()
        tiled[:, rows, columns] += tile
    assert torch.equal(tiled, allowed.int())

    if mask.plain:
        plain = torch.ones(mask.queries, mask.keys).tril(mask.keys - mask.queries if mask.causal else 99)
        assert torch.equal(allowed.all(0), plain.bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_masks_stay_finite_after_scores_are_added(dtype: torch.dtype) -> None:
    mask = AttentionMask(True, 3, 3)
    finite = mask.dense(dtype, CPU, finite=True)
    assert finite.isfinite().all()
    assert (finite - 1000).isfinite().all()
    assert torch.equal(finite.softmax(-1), mask.dense(dtype, CPU).softmax(-1))
    assert mask.dense(dtype, CPU)[0, 0, 0].tolist() == [0, float("-inf"), float("-inf")]
    assert mask.dense(dtype, CPU) is mask.dense(dtype, CPU)


def test_plain_masks_need_no_tensor() -> None:
    assert AttentionMask(True, 4, 4).plain
    assert AttentionMask(True, 1, 9).plain
    assert AttentionMask(True, 4, 4, window=4).plain
    assert not AttentionMask(True, 4, 4, window=3).plain
    assert not AttentionMask(True, 1, 9, window=8).plain
    assert not AttentionMask(True, 3, 9).plain
    assert not AttentionMask(True, 4, 4, prefix=torch.tensor([2])).plain


def test_a_window_leaves_tiles_out() -> None:
    assert len(tiles_of(AttentionMask(True, 64, 64, window=9), 8)) == 8 + 7  # the diagonal and one below
    assert len(tiles_of(AttentionMask(True, 64, 64), 8)) == 8 * 9 // 2
    pattern = BlockPattern(local_blocks(8, 0), 8)
    assert len(tiles_of(AttentionMask(False, 64, 64, blocks=pattern), 8)) == 8


def test_parts_that_do_nothing_or_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="prefix does nothing"):
        AttentionMask(False, 3, 3, prefix=torch.tensor([1]))
    with pytest.raises(ValueError, match="at least 1"):
        AttentionMask(True, 3, 3, window=0)
    with pytest.raises(ValueError, match="at least 3 blocks"):
        AttentionMask(True, 5, 5, blocks=BlockPattern(torch.ones(2, 2).bool(), 2))
    with pytest.raises(ValueError, match="go together"):
        AttentionMask(True, 3, 3, query_documents=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="square of booleans"):
        BlockPattern(torch.ones(2, 3).bool(), 2)


def test_block_patterns() -> None:
    assert local_blocks(4, 1).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert strided_blocks(4, 2).int().tolist() == [[0, 1, 0, 1]] * 4
    assert global_blocks(3, 1).int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    chosen = random_blocks(6, 2, seed=3)
    assert chosen.sum(-1).tolist() == [2] * 6
    assert torch.equal(chosen, random_blocks(6, 2, seed=3))
    assert not torch.equal(chosen, random_blocks(6, 2, seed=4))


def test_causal_mask_reads_the_state() -> None:
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    state = State(attention_mask=real, prefix_lengths=torch.tensor([2, 0]))
    mask = causal_mask(state, 5)
    assert mask is causal_mask(state, 5)
    assert mask.allowed(CPU)[0, 0].int().tolist() == [
        [0, 0, 1, 1, 0],  # the prefix: the two real tokens behind the padding
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert torch.equal(mask.allowed(CPU)[1, 0], torch.ones(5, 5).tril().bool() & real[1].bool())
    assert causal_mask(state, 5, window=2) is not mask
    assert bidirectional_mask(State(), 5, window=2).allowed(CPU)[0, 0].sum() == 5 + 4 + 4


def test_a_cache_that_forgets_what_the_mask_needs_is_refused() -> None:
    state = State(cache=WindowKVCache(1, 1, 1, 4, 2))
    with pytest.raises(ValueError, match="keeps a window of 4 tokens and the layers look back at everything"):
        causal_mask(state, 2)
    with pytest.raises(ValueError, match="look back 5"):
        causal_mask(state, 2, window=5)
    state = State(cache=KVCache(1, 1, 1, 8, 2), prefix_lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match="must hold all of it; it ends at 3 and this call at 2"):
        causal_mask(state, 2)


def test_caches_grow_shrink_and_reorder() -> None:
    cache = GrowingKVCache(2, 2, 1, head_size=1, start=2)
    for step in range(5):
        cache.begin(1, torch.tensor([[1], [step % 2]]))
        for layer in range(2):
            new = torch.full((2, 1, 1, 1), step + 10.0 * layer)
            new[1] += 100
            keys, values = cache.extend(layer, new, -new)
        cache.finish(1)
    assert cache.max_length == 8
    assert keys[:, 0, :, 0].tolist() == [[10, 11, 12, 13, 14], [110, 111, 112, 113, 114]]
    assert torch.equal(values, -keys)
    assert cache.nbytes == 2 * 2 * 2 * 8 * 4
    cache.select(torch.tensor([1, 1, 0]))
    cache.crop(3)
    assert (cache.batch, cache.length) == (3, 3)
    assert cache.begin(1, None).tolist() == [1, 1, 3]
    keys, _ = cache.extend(0, torch.zeros(3, 1, 1, 1), torch.zeros(3, 1, 1, 1))
    assert keys[:, 0, :, 0].tolist() == [[100, 101, 102, 0]] * 2 + [[0, 1, 2, 0]]
    assert cache.real_keys(1) is not None
    with pytest.raises(ValueError, match="cannot be cut to 4"):
        cache.crop(4)
    with pytest.raises(ValueError, match="cannot go back"):
        WindowKVCache(1, 1, 1, 4, 2).crop(0)
    with pytest.raises(ValueError, match="larger max_length"):
        KVCache(1, 1, 1, 2, 1).begin(3, None)
