"""Batches of rows of about one length: every example once an epoch, less padding, the same for any ranks."""

import random

import pytest

from fmlab.data import ByLengthSampler, ExampleSampler
from fmlab.data.by_length import POOL

DICE = random.Random(1)
EXAMPLES = [
    {"input_ids": [n + 3] * length, "labels": [n + 3] * DICE.randint(length, length + 4)}
    for n, length in enumerate(DICE.randint(1, 40) for _ in range(64))
]


def rows(batch):
    """(first token, real inputs, targets) of each row."""
    real = batch["attention_mask"].sum(1) if "attention_mask" in batch else [batch["input_ids"].shape[1]] * 4
    targets = (batch["labels"] >= 0).sum(1)
    return [(int(a[0]), int(b), int(c)) for a, b, c in zip(batch["input_ids"], real, targets, strict=True)]


def test_each_example_comes_whole_and_once_an_epoch():
    sampler = ByLengthSampler(EXAMPLES, 0, 4)
    seen = [row for step in range(POOL) for row in rows(sampler.batch(step))]
    wanted = [(e["input_ids"][0], len(e["input_ids"]), len(e["labels"])) for e in EXAMPLES]
    assert sorted(seen) == sorted(wanted)
    assert sorted(row for batch in sampler.evaluation() for row in rows(batch)) == sorted(wanted)
    again = [row for step in range(POOL, 2 * POOL) for row in rows(sampler.batch(step))]
    assert sorted(again) == sorted(wanted)
    assert again != seen


def test_there_is_less_padding_and_there_are_few_shapes():
    def size(sampler):
        return sum(t.numel() for step in range(POOL) for t in sampler.batch(step).values())

    sampler = ByLengthSampler(EXAMPLES, 0, 4)
    assert size(sampler) < 0.8 * size(ExampleSampler(EXAMPLES, 0, 4))
    shapes = {(b["input_ids"].shape[1], b["labels"].shape[1]) for b in map(sampler.batch, range(POOL))}
    longest = ExampleSampler(EXAMPLES, 0, 4).lengths.values()
    assert all(length % 8 == 0 or length in longest for shape in shapes for length in shape)
    assert len(shapes) > 1


@pytest.mark.parametrize("step", [0, 7, POOL + 3])
def test_two_ranks_share_the_batch_of_one(step):
    alone = rows(ByLengthSampler(EXAMPLES, 0, 8, seed=5).batch(step))
    shared = [row for r in range(2) for row in rows(ByLengthSampler(EXAMPLES, 0, 8, 5, r, 2).batch(step))]
    assert shared == alone
