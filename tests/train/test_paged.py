"""Pages and continuous batching: the same text as alone, whatever runs beside it; no page is lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.models import GPT, Llama, RecurrentLM
from fmlab.models.attention.paged import OutOfPages, PagedKVCache, PagePool, PageTable
from fmlab.train.generate import generate_ids
from fmlab.train.serve import Batcher, Request
from tests.models.reference import tokens

END = 0


def gpt() -> GPT:
    torch.manual_seed(0)
    overrides = dict(vocab_size=61, hidden_size=32, num_layers=2, num_heads=2, max_positions=64, init_std=0.3)
    return GPT.from_preset("gpt2-tiny", **overrides).eval()


def llama() -> Llama:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48)
    return Llama.from_preset("llama-tiny", vocab_size=61, **shape).eval()


@pytest.mark.parametrize("build", [gpt, llama])
def test_paged_logits_equal_those_of_each_text_alone(build) -> None:  # type: ignore[no-untyped-def]
    model = build()
    pool = PagePool.for_model(model, pages=12, page_size=4)
    texts = [tokens(1, n, vocab=61, seed=n)[0] for n in (3, 9, 6)]
    tables = [PageTable() for _ in texts]
    length = max(map(len, texts))
    ids, mask = torch.zeros(3, length, dtype=torch.long), torch.zeros(3, length, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, length - len(text) :], mask[row, length - len(text) :] = text, 1
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=PagedKVCache(pool, tables))
        assert [table.length for table in tables] == [3, 9, 6]
        for step in range(4):
            new = torch.tensor([[step + 5], [step + 20], [step + 40]])
            logits = model(new, cache=PagedKVCache(pool, tables)).logits[:, -1]
            for row in range(3):
                texts[row] = torch.cat([texts[row], new[row]])
                alone = model(texts[row][None]).logits[0, -1]
                torch.testing.assert_close(logits[row], alone, rtol=0, atol=1e-5)
    assert pool.free == 12 - sum(-(-len(text) // 4) for text in texts)
    for table in tables:
        pool.release(table)
    assert pool.free == 12


def test_a_full_pool_changes_nothing_and_says_so() -> None:
    pool = PagePool(layers=1, pages=2, page_size=4, heads=1, head_size=2)
    table = PageTable()
    pool.grow(table, 5)
    with pytest.raises(OutOfPages, match="1 pages are needed and 0 of 2 are free"):
        pool.grow(table, 9)
    assert len(table.pages) == 2
    assert pool.bytes_per_page == 2 * 4 * 2 * 4
    with pytest.raises(ValueError, match="pages are no use"):
        PagePool.for_model(RecurrentLM.from_preset("gru-tiny"), pages=4)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=7),
    st.integers(8, 20),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_text_is_what_it_is_alone(
    shapes: list[tuple[int, int, bool]], pages: int, max_batch: int, continuous: bool
) -> None:
    model = gpt()
    requests = [
        Request(tuple(tokens(1, n, vocab=61, seed=i)[0].tolist()), new, greedy, seed=i)
        for i, (n, new, greedy) in enumerate(shapes)
    ]
    batcher = Batcher(model, pages, page_size=4, max_batch=max_batch, end_of_text=END, continuous=continuous)
    together = batcher.run(requests)
    for request, got in zip(requests, together, strict=True):
        wanted = generate_ids(
            model, [request.prompt], END, request.max_new_tokens, greedy=request.greedy, seed=request.seed
        )[0]
        assert got == wanted
    assert batcher.pool.free == pages
    assert batcher.counts.new_tokens == sum(map(len, together))


def test_the_youngest_gives_way_when_pages_run_out_and_loses_nothing() -> None:
    model = gpt()
    requests = [Request(tuple(range(1, 6)), 20, True), Request(tuple(range(7, 12)), 20, True)]
    tight = Batcher(model, pages=9, page_size=4)
    assert tight.run(requests) == Batcher(model, pages=40, page_size=4).run(requests)
    assert tight.counts.evictions > 0
    assert tight.pool.free == 9


def test_continuous_batching_takes_fewer_calls_than_a_static_batch() -> None:
    requests = [Request((5, 6, 7), 13 if i % 4 == 0 else 1, True) for i in range(12)]
    calls = {}
    for continuous in (True, False):
        batcher = Batcher(gpt(), pages=64, page_size=4, max_batch=4, continuous=continuous)
        batcher.run(requests)
        calls[continuous] = batcher.counts.prefills + batcher.counts.decodes
    assert calls[True] < 0.75 * calls[False]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 3), "prompt is empty"),
        (Request((61,), 3), "token 61 is not one of the model's 61"),
        (Request((1,) * 60, 5), "more than the model's 64 positions"),
        (Request((1,) * 30, 20), "50 tokens take 13 pages and the pool has 10"),
        (Request((1,), 0), "max_new_tokens must be at least 1"),
        (Request((1,), 3, temperature=0.0), "temperature must be above 0"),
        (Request((1,), 3, top_k=62), "top_k must be between 1 and 61"),
        (Request((1,), 3, top_p=0.0), "top_p must be above 0"),
    ],
)
def test_what_could_never_finish_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batcher(gpt(), pages=10, page_size=4).submit(request_)
