"""Buckets of lengths: the loss stays, the padding is the least there can be, and the programs are counted."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.data.buckets import LengthBuckets, choose_buckets, signatures
from fmlab.models import BERT, GPT
from fmlab.objectives import CausalLM, MaskedLM


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_the_loss_of_a_padded_batch_is_that_of_the_batch(kind: str) -> None:
    torch.manual_seed(0)
    model = (
        GPT.from_preset("gpt2-tiny", num_layers=2)
        if kind == "causal"
        else BERT.from_preset("bert-tiny", num_layers=2)
    ).eval()
    objective = CausalLM() if kind == "causal" else MaskedLM()
    batch = {"input_ids": torch.randint(5, 500, (3, 11)), "labels": torch.randint(5, 500, (3, 11))}
    padded = LengthBuckets((8, 16, 32)).pad(batch)
    assert {name: tuple(tensor.shape) for name, tensor in padded.items()} == {
        "input_ids": (3, 16),
        "labels": (3, 16),
        "attention_mask": (3, 16),
    }
    for given_batch in (padded, {key: padded[key] for key in batch} if kind == "causal" else padded):
        want, got = objective(model, batch), objective(model, given_batch)
        for name in want:
            assert torch.equal(want[name].count, got[name].count)
            torch.testing.assert_close(got[name].sum, want[name].sum, rtol=5e-7 * 4, atol=0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 3))
def test_no_other_buckets_pad_less(lengths: list[int], count: int) -> None:
    best = choose_buckets(lengths, count)
    assert len(best.lengths) <= count
    ends = sorted(set(lengths))
    others = [LengthBuckets((*low, ends[-1])) for n in range(count) for low in combinations(ends[:-1], n)]
    assert best.waste(lengths) == pytest.approx(min(other.waste(lengths) for other in others))


@pytest.mark.parametrize(
    ("rows", "full", "rest"),
    [(8551, 1068, 7), (1043, 130, 3)],  # the training and validation sentences of CoLA, in batches of 8
)
def test_a_partial_last_batch_is_one_more_program(rows: int, full: int, rest: int) -> None:
    lengths = [64] * rows
    assert divmod(rows, 8) == (full, rest)
    assert signatures(lengths, 8) == {(8, 64), (rest, 64)}
    assert signatures(lengths, 8, last="drop") == signatures(lengths, 8, last="pad") == {(8, 64)}


def test_every_length_is_a_program_until_there_are_buckets() -> None:
    lengths = [17, 23, 31, 40, 23, 56, 61, 64, 33, 12]
    assert len(signatures(lengths, 1)) == 9
    assert signatures(lengths, 1, LengthBuckets((32, 64))) == {(1, 32), (1, 64)}
    assert signatures(lengths, 4, LengthBuckets((64,)), last="drop") == {(4, 64)}


@pytest.mark.parametrize("lengths", [(), (0, 4), (8, 4), (4, 4)])
def test_buckets_that_are_none_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rising order"):
        LengthBuckets(lengths)


def test_what_fits_no_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens are longer than the longest bucket, 32"):
        LengthBuckets((8, 32)).bucket(33)
    with pytest.raises(ValueError, match="at least 1 bucket"):
        choose_buckets([3, 4], 0)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        signatures([3], 0)
