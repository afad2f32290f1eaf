"""What a trained encoder has to beat: counts of words, without a network.

BM25: Robertson and Zaragoza 2009, *The Probabilistic Relevance Framework*, section 3.2. TF-IDF with logistic
regression is scikit-learn's, with its default settings.

Shapes: q queries, n documents.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmlab.data import LabelledTexts
from fmlab.extras import require
from fmlab.train.retrieval import Retrieval

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text in lower case, an underscore counting as a letter."""
    return _WORD.findall(text.lower())


# region bm25
def bm25_scores(queries: Sequence[str], documents: Sequence[str], k1: float = 1.2, b: float = 0.75) -> Tensor:
    """How well each document answers each query, fp64 [q,n].

    A query's word adds idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length)); its idf is
    log(1 + (n - df + 0.5) / (df + 0.5)), df the number of documents that have it.
    Raises ValueError without documents.
    """
    if not documents:
        raise ValueError("there are no documents to score")
    counts = [Counter(words(document)) for document in documents]
    lengths = [sum(count.values()) for count in counts]
    mean = max(1.0, sum(lengths) / len(lengths))
    df = Counter(word for count in counts for word in count)
    scores = torch.zeros(len(queries), len(documents), dtype=torch.float64)
    for row, query in zip(scores, queries, strict=True):
        for word in words(query):
            idf = math.log(1 + (len(documents) - df[word] + 0.5) / (df[word] + 0.5))
            for place, (count, length) in enumerate(zip(counts, lengths, strict=True)):
                if tf := count[word]:
                    row[place] += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean))
    return scores


# endregion


def tfidf_scores(queries: Sequence[str], documents: Sequence[str]) -> Tensor:
    """Cosine of TF-IDF vectors, fp64 [q,n]. Needs the extra `data`."""
    text: Any = require("data", "sklearn.feature_extraction.text")
    vectorizer = text.TfidfVectorizer(token_pattern=r"\w+")
    documents_nw = vectorizer.fit_transform(documents)
    return torch.from_numpy((vectorizer.transform(queries) @ documents_nw.T).toarray())


def retrieval_of(scores_qn: Tensor, relevant: Sequence[int]) -> Retrieval:
    """Recall and mean reciprocal rank; of equal scores the relevant one counts as last."""
    own = scores_qn[torch.arange(len(relevant)), torch.tensor(relevant)]
    return Retrieval.of((scores_qn >= own[:, None]).sum(1))


def tfidf_accuracy(learn: LabelledTexts, test: LabelledTexts) -> float:
    """Share of `test` whose class TF-IDF and logistic regression find after `learn`. Needs the extra `data`.

    Raises ValueError when the two have other classes.
    """
    if learn.classes != test.classes:
        raise ValueError(f"the classes differ: {learn.classes} and {test.classes}")
    text: Any = require("data", "sklearn.feature_extraction.text")
    linear: Any = require("data", "sklearn.linear_model")
    vectorizer = text.TfidfVectorizer(token_pattern=r"\w+")
    model = linear.LogisticRegression(max_iter=1000)
    model.fit(vectorizer.fit_transform(learn.documents), learn.labels)
    return float(model.score(vectorizer.transform(test.documents), test.labels))
