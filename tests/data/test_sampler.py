"""The sampler: one global order for every world size, each token once, exact resumption."""

import numpy as np
import pytest
import torch

from fmlab.data import Tokens, TokenSampler, evaluation_batches
from fmlab.data.sampler import check_batch_size, split_micro_batches


def make_tokens(n=1000, document=70):
    """Token i is i, so that a batch shows where it came from; a document ends every `document` tokens."""
    borders = np.array([*range(0, n, document), n])
    return Tokens(np.arange(n, dtype=np.int32), borders, n, "test")


def test_the_global_batch_does_not_depend_on_the_number_of_ranks():
    tokens = make_tokens()
    for step in (0, 3, 17, 40):
        whole = TokenSampler(tokens, 16, 12, seed=5).batch(step)
        for world in (2, 3, 4, 12):
            parts = [TokenSampler(tokens, 16, 12, 5, rank, world).batch(step) for rank in range(world)]
            for name, value in whole.items():
                assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_an_epoch_sees_each_window_once_and_is_shuffled_anew():
    sampler = TokenSampler(make_tokens(), 16, 7, seed=1)
    n = sampler.windows_per_epoch
    rows = torch.cat([sampler.batch(step)["input_ids"] for step in range(2 * n // 7 + 1)])
    epochs = [rows[:n], rows[n : 2 * n]]  # 7 does not divide n: the batch on the border holds both
    assert n % 7
    for rows in epochs:
        assert rows.unique().numel() == n * 16, "a token was seen twice in an epoch"
    assert epochs[0][:, 0].tolist() != sorted(epochs[0][:, 0].tolist())
    assert not torch.equal(epochs[0], epochs[1])


def test_labels_are_the_next_tokens():
    batch = TokenSampler(make_tokens(), 16, 4).batch(2)
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)


def test_packed_batches_keep_documents_apart():
    batch = TokenSampler(make_tokens(), 100, 4, packed=True).batch(0)
    ids, labels, documents = batch["input_ids"], batch["labels"], batch["document_ids"]
    last_of_document = (ids + 1) % 70 == 0
    assert last_of_document.any()
    assert torch.equal(labels == -100, last_of_document)
    assert torch.equal(labels[~last_of_document], ids[~last_of_document] + 1)
    assert torch.equal(documents, ids // 70 - (ids // 70)[:, :1])


def test_seed_and_step_alone_decide_and_resuming_is_exact():
    tokens = make_tokens()
    stream = iter(TokenSampler(tokens, 16, 4, seed=9))
    batches = [next(stream)["input_ids"] for _ in range(30)]
    sampler = TokenSampler(tokens, 16, 4, seed=9)
    assert torch.equal(sampler.batch(29)["input_ids"], batches[29])
    assert torch.equal(sampler.batch(2)["input_ids"], batches[2])
    fresh = iter(sampler)
    for _ in range(11):
        next(fresh)
    resumed = TokenSampler(tokens, 16, 4, seed=9, rank=1, world_size=2)
    resumed.load_state_dict(sampler.state_dict())
    assert torch.equal(next(iter(resumed))["input_ids"], batches[11][2:])
    assert not torch.equal(TokenSampler(tokens, 16, 4, seed=8).batch(0)["input_ids"], batches[0])
    with pytest.raises(ValueError, match="seed: 9 in the checkpoint, 8 now"):
        TokenSampler(tokens, 16, 4, seed=8).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_evaluation_counts_every_token_once_on_any_number_of_ranks(world, packed):
    tokens = make_tokens(n=530)
    seen, lengths = [], set()
    for rank in range(world):
        batches = list(evaluation_batches(tokens, 16, 8, rank, world, packed))
        lengths.add(tuple(tuple(b["input_ids"].shape) for b in batches))
        seen += [b["labels"][b["labels"] != -100] for b in batches]
    assert len(lengths) == 1, "ranks with different numbers or shapes of batches would hang"
    targets = torch.cat(seen).sort().values.tolist()
    expected = [i for i in range(1, 530) if not (packed and i % 70 == 0)]
    assert targets == expected


def test_limited_evaluation_is_spread_over_the_corpus():
    batches = list(evaluation_batches(make_tokens(), 10, 4, max_batches=3))
    assert len(batches) == 3
    firsts = torch.cat([b["input_ids"][:, 0] for b in batches])
    assert firsts.unique().numel() == 12
    assert firsts.min() == 0
    assert firsts.max() == 990


def test_what_does_not_divide_is_refused_with_what_does():
    with pytest.raises(ValueError, match=r"batch_size 10 .* 4 ranks .*multiples of 4, such as 4, 8, 12"):
        TokenSampler(make_tokens(), 16, 10, world_size=4)
    with pytest.raises(ValueError, match=r"multiples of 6, such as 6, 12"):
        check_batch_size(4, 2, 3)
    with pytest.raises(ValueError, match="rank 2 is not one of 0 to 1"):
        TokenSampler(make_tokens(), 16, 4, rank=2, world_size=2)
    with pytest.raises(ValueError, match=r"too few for sequences of 999; legal seq_len: 1 to 499"):
        TokenSampler(make_tokens(), 999, 4)
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        TokenSampler(make_tokens(), 0, 4)
    assert TokenSampler(make_tokens(), 499, 1).batch(5)["input_ids"].shape == (1, 499)
    batch = TokenSampler(make_tokens(), 16, 6).batch(0)
    parts = split_micro_batches(batch, 3)
    assert torch.equal(torch.cat([p["labels"] for p in parts]), batch["labels"])
    with pytest.raises(ValueError, match=r"legal: \[1, 2, 3, 6\]"):
        split_micro_batches(batch, 4)
