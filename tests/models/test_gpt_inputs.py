"""Padding, packing and caching change nothing but the cost; bad inputs are refused with the reason."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.models import GPT, GPTConfig
from fmlab.models.attention import AttentionMask, sdpa_core
from tests.models.gpt_reference import shifted, small_gpt, tokens

lengths = st.lists(st.integers(1, 14), min_size=1, max_size=4)
MODEL = small_gpt().double().eval()


def left_padded(rows: list[torch.Tensor], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return ids, mask


@settings(max_examples=12, deadline=None)
@given(lengths, st.integers(0, 100))
def test_left_padded_rows_equal_the_rows_alone(sizes: list[int], fill: int) -> None:
    rows = [tokens(1, n, seed=n)[0] for n in sizes]
    ids, mask = left_padded(rows, fill)
    logits = MODEL(ids, attention_mask=mask).logits
    assert not logits.isnan().any()
    for row, got in zip(rows, logits, strict=True):
        torch.testing.assert_close(got[-len(row) :], MODEL(row[None]).logits[0], rtol=0, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(lengths)
def test_packed_documents_equal_separate_runs(sizes: list[int]) -> None:
    documents = [tokens(1, n, seed=i) for i, n in enumerate(sizes)]
    ids = torch.cat(documents, 1)
    document_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]
    logits = MODEL(ids, document_ids=document_ids).logits
    alone = torch.cat([MODEL(document).logits for document in documents], 1)
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-12)


def test_packed_documents_with_padding_and_ids_that_come_back_equal_separate_runs() -> None:
    documents = [tokens(1, n, seed=n) for n in (4, 1, 3)]
    alone = torch.cat([MODEL(document).logits for document in documents], 1)
    padding = torch.full((1, 2), 7)
    ids = torch.cat([padding, *documents[:2], padding, documents[2]], 1)
    document_ids = torch.tensor([[0] * 6 + [1] + [0] * 5])  # padding inside two documents, two of one id
    mask = torch.tensor([[0] * 2 + [1] * 5 + [0] * 2 + [1] * 3])
    logits = MODEL(ids, attention_mask=mask, document_ids=document_ids).logits
    torch.testing.assert_close(logits[mask.bool()], alone[0], rtol=0, atol=1e-12)


def test_gradients_of_padded_and_packed_batches_equal_those_of_separate_rows() -> None:
    rows = [tokens(1, n, seed=n) for n in (5, 9, 3)]
    packed = torch.cat(rows, 1)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 9, 3]))[None]
    ids, mask = left_padded([row[0] for row in rows], fill=7)
    padded_labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        padded_labels[i, -row.shape[1] :] = shifted(row)[0]
    parameters = list(MODEL.parameters())

    def gradients(**batch: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(MODEL(**batch).loss_sum, parameters))

    separate = [gradients(input_ids=row, labels=shifted(row)) for row in rows]
    expected = [sum(parts) for parts in zip(*separate, strict=True)]
    labels = torch.cat([shifted(row) for row in rows], 1)
    for got in (
        gradients(input_ids=packed, labels=labels, document_ids=documents),
        gradients(input_ids=ids, labels=padded_labels, attention_mask=mask),
    ):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@settings(max_examples=12, deadline=None)
@given(lengths, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_cached_logits_equal_full_recomputation(sizes: list[int], steps: list[int], pad: bool) -> None:
    """A prompt of rows of any length (left-padded), then pieces of several tokens each."""
    rows = [tokens(1, n if pad else sizes[0], seed=i)[0] for i, n in enumerate(sizes)]
    prompt, mask = left_padded(rows, fill=3)
    pieces = [tokens(len(rows), n, seed=50 + i) for i, n in enumerate(steps)]
    cache = MODEL.new_cache(len(rows), max_length=prompt.shape[1] + sum(steps))
    got = [MODEL(prompt, attention_mask=mask if pad else None, cache=cache).logits]
    got += [MODEL(piece, cache=cache).logits for piece in pieces]
    whole = torch.cat([prompt, *pieces], 1)
    whole_mask = torch.cat([mask, torch.ones(len(rows), sum(steps), dtype=torch.long)], 1)
    expected = MODEL(whole, attention_mask=whole_mask).logits
    real = whole_mask.bool()
    torch.testing.assert_close(torch.cat(got, 1)[real], expected[real], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fully_masked_queries_give_zeros_and_finite_gradients(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 8, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    real = torch.ones(2, 8, dtype=torch.bool)
    real[1, :5] = False
    mixed = sdpa_core(q, k, v, AttentionMask(True, 8, 8, real))
    assert torch.equal(mixed[1, :, :5], torch.zeros_like(mixed[1, :, :5]))
    # Of a whole row: a single number may round to nothing.
    assert mixed[1, :, 5:].abs().sum(-1).min() > 0
    for grad in torch.autograd.grad(mixed.sum(), (q, k, v)):
        assert grad.isfinite().all()


def test_a_single_query_sees_all_keys_and_several_are_aligned_to_the_end() -> None:
    allowed = AttentionMask(True, 2, 5).allowed(torch.device("cpu"))[0, 0].int()
    assert allowed.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    q, k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    expected = torch.softmax(q @ k.mT / 2, -1) @ v
    torch.testing.assert_close(sdpa_core(q, k, v, AttentionMask(True, 1, 5)), expected)


def test_the_injected_core_and_cross_entropy_are_the_ones_used_and_masks_are_built_once() -> None:
    masks, losses = [], []

    def core(q, k, v, mask, dropout, **more):  # type: ignore[no-untyped-def]
        masks.append(mask.dense(q.dtype, q.device))
        return sdpa_core(q, k, v, mask, dropout, **more)

    def cross_entropy(hidden, weight, labels):  # type: ignore[no-untyped-def]
        losses.append(hidden.shape)
        return hidden.sum()

    model = GPT(MODEL.config, attention_core=core, cross_entropy=cross_entropy)
    ids = tokens(2, 6)
    model(ids, labels=ids, attention_mask=torch.ones_like(ids))
    assert len(masks) == 3
    assert all(mask is masks[0] for mask in masks)
    assert losses == [(12, 24)]


def test_dropout_acts_in_training_only() -> None:
    model = small_gpt(dropout=0.5)
    ids = tokens(2, 6)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


ids = tokens(2, 6)
BAD = {
    "unknown field": (lambda: GPT.from_preset("gpt2-tiny", heads=3), "has no heads.*num_heads"),
    "unknown preset": (lambda: GPT.from_preset("gpt-2"), "Did you mean 'gpt2'.*gpt3-175b"),
    "heads": (lambda: GPTConfig(10, 10, 1, 768, 7), r"legal: \[1, 2, 3, 4, 6, 8, 12"),
    "zero layers": (lambda: GPTConfig(10, 10, 0, 8, 2), "num_layers must be at least 1"),
    "too long": (lambda: MODEL(tokens(1, 49)), "49 tokens is longer than the model's 48 positions"),
    "too long packed": (
        lambda: MODEL(tokens(1, 49), document_ids=torch.zeros(1, 49, dtype=torch.long)),
        r"outside the embedding of 48 rows: got 0..48",
    ),
    "labels' shape": (
        lambda: MODEL(ids, labels=ids[:, 1:]),
        r"labels must have the shape.*\[2, 6\].*\[2, 5\]",
    ),
    "one-dimensional ids": (lambda: MODEL(ids[0]), r"must be \[batch, length\]"),
    "no token": (lambda: MODEL(ids[:, :0]), r"with a token at least, got shape \[2, 0\]"),
    "token id": (lambda: MODEL(torch.full((1, 3), 101)), "got 101..101, legal is 0..100"),
    "label id": (lambda: MODEL(ids, labels=torch.full_like(ids, 101)), "outside the vocabulary of 101"),
    "cache's length": (lambda: MODEL.new_cache(1, 49), "exceeds the model's 48 positions"),
    "cache's batch": (lambda: MODEL(ids, cache=MODEL.new_cache(3)), "for a batch of 3, got 2"),
    "cache full": (lambda: MODEL(ids, cache=MODEL.new_cache(2, 5)), "cannot take 6 more"),
    "cache and documents": (
        lambda: MODEL(ids, cache=MODEL.new_cache(2), document_ids=ids),
        "cannot be used together",
    ),
    "memory": (lambda: GPT.from_preset("gpt3-175b"), "take 698.4 GB .* meta device"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def test_a_call_with_a_cache_builds_no_graph() -> None:
    cache = MODEL.new_cache(2)
    assert not MODEL(ids, cache=cache).logits.requires_grad
    assert not cache.key.requires_grad


def test_generation_past_the_positions_is_refused() -> None:
    cache = MODEL.new_cache(1)
    MODEL(tokens(1, 48), cache=cache)
    with pytest.raises(ValueError, match="49 tokens is longer than the model's 48"):
        MODEL(tokens(1, 1), cache=cache)
