"""Search by meaning: the nearest vectors, and how good a search is.

Shapes: q queries, n documents, d width of the vectors, k hits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fmlab.data.passages import load_passages
from fmlab.train.embed import TextEncoder

CHUNK = 4096  # documents compared at once


def nearest(queries_qd: Tensor, documents_nd: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    """(scores, numbers) of the k documents with the largest inner product for each query, best first, [q,k].

    For vectors of length 1 that is the cosine of their angle. Of equal scores the lower number comes first.
    The documents are compared in chunks: memory is q * (k + chunk), not q * n.
    Raises ValueError when the widths differ, or there are fewer than k documents.
    """
    if queries_qd.dim() != 2 or documents_nd.dim() != 2 or queries_qd.shape[1] != documents_nd.shape[1]:
        raise ValueError(
            "queries [q,d] and documents [n,d] must have the same width, got "
            f"{list(queries_qd.shape)} and {list(documents_nd.shape)}"
        )
    if not 1 <= k <= len(documents_nd):
        raise ValueError(f"k must be from 1 to the {len(documents_nd)} documents there are, got {k}")
    scores = queries_qd.new_empty(len(queries_qd), 0)
    numbers = torch.empty(len(queries_qd), 0, dtype=torch.long, device=queries_qd.device)
    for start in range(0, len(documents_nd), CHUNK):
        part = queries_qd @ documents_nd[start : start + CHUNK].T
        ids = torch.arange(start, start + part.shape[1], device=part.device).expand_as(part)
        both, both_ids = torch.cat([scores, part], 1), torch.cat([numbers, ids], 1)
        order = both.argsort(dim=1, descending=True, stable=True)[:, :k]
        scores, numbers = both.gather(1, order), both_ids.gather(1, order)
    return scores, numbers


def ranks_of(queries_qd: Tensor, documents_nd: Tensor, relevant: Sequence[int]) -> Tensor:
    """The place, from 1, of each query's relevant document among all documents, [q].

    Documents with the same score as the relevant one count as before it: a tie is no success.
    """
    _check_relevant(relevant, len(queries_qd), len(documents_nd))
    scores_qn = queries_qd @ documents_nd.T
    own_q1 = scores_qn.gather(1, torch.as_tensor(relevant, device=scores_qn.device)[:, None])
    return (scores_qn >= own_q1).sum(1)


@dataclass(frozen=True)
class Retrieval:
    """How well relevant documents are found, over `count` queries.

    recall: k -> part of the queries whose relevant document is among the first k
    mrr:    mean of 1 / place of the relevant document (mean reciprocal rank)
    """

    recall: dict[int, float]
    mrr: float
    count: int

    @classmethod
    def of(cls, ranks: Tensor, ks: Sequence[int] = (1, 3, 10)) -> "Retrieval":
        """From the places of the relevant documents, [q]. Raises ValueError without any."""
        if not len(ranks):
            raise ValueError("there is no query to measure retrieval with")
        recall = {k: (ranks <= k).double().mean().item() for k in ks}
        return cls(recall, ranks.double().reciprocal().mean().item(), len(ranks))

    def __str__(self) -> str:
        parts = ", ".join(f"recall@{k} {value:.3f}" for k, value in self.recall.items())
        return f"{parts}, MRR {self.mrr:.3f} over {self.count} queries"


class Hit(NamedTuple):
    """A document that was found."""

    score: float
    title: str
    text: str


class Search:
    """A collection of texts that can be searched by meaning.

    encoder: from texts to vectors of length 1
    titles, texts: of the documents; what is embedded is the title and the text
    """

    def __init__(self, encoder: TextEncoder, titles: Sequence[str], texts: Sequence[str]) -> None:
        """Embeds all documents. Raises ValueError when titles and texts do not pair up."""
        if len(titles) != len(texts) or not titles:
            raise ValueError(f"got {len(titles)} titles for {len(texts)} texts; give one or more, as many")
        self.encoder, self.titles, self.texts = encoder, list(titles), list(texts)
        self.vectors_nd = encoder([f"{title}\n{text}" for title, text in zip(titles, texts, strict=True)])

    @classmethod
    def documentation(cls, encoder: TextEncoder | None = None) -> "Search":
        """The sections of Python's language reference, by default with all-MiniLM-L6-v2."""
        passages = load_passages()
        return cls(encoder or TextEncoder.minilm(), passages.firsts, passages.seconds)

    def __call__(self, query: str, k: int = 3) -> list[Hit]:
        """The k documents nearest to the query, best first."""
        scores, numbers = nearest(self.encoder([query]), self.vectors_nd, k)
        return [
            Hit(score, self.titles[i], self.texts[i])
            for score, i in zip(scores[0].tolist(), numbers[0].tolist(), strict=True)
        ]


def _check_relevant(relevant: Sequence[int], queries: int, documents: int) -> None:
    if len(relevant) != queries:
        raise ValueError(f"{queries} queries need as many relevant documents, got {len(relevant)}")
    if bad := [number for number in relevant if not 0 <= number < documents]:
        raise ValueError(f"there is no document {bad[0]}; legal: 0 to {documents - 1}")
