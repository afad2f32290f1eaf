"""A corpus as one array of token ids, with the borders of its documents."""

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fmlab.data.cache import cached
from fmlab.data.corpora import Corpus
from fmlab.data.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Tokens:
    """All documents one after the other, each closed by the tokenizer's end_of_text (BERT: [SEP], T5: </s>).

    ids:         int32 [n]
    borders:     int64 [documents + 1]; document i is ids[borders[i]:borders[i + 1]]
    end_of_text: the closing token
    fingerprint: changes with the text and with the tokenizer
    """

    ids: NDArray[np.int32]
    borders: NDArray[np.int64]
    end_of_text: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.borders) - 1

    def document_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the document that each position of `ids` belongs to."""
        return np.searchsorted(self.borders, positions, side="right") - 1

    def __repr__(self) -> str:
        count = f"{len(self):,} tokens, {self.num_documents:,} documents"
        return f"Tokens({count}, fingerprint {self.fingerprint})"


def encode(corpus: Corpus, tokenizer: TextTokenizer) -> Tokens:
    """Encode a corpus, or take it from the user's cache.

    A special token written in a document is encoded as characters: text cannot make a border.
    """
    fingerprint = f"{corpus.fingerprint}-{tokenizer.fingerprint}"

    def make() -> Tokens:
        documents = tokenizer.encode_batch(corpus.documents, special=False)
        lengths = [len(document) + 1 for document in documents]
        ids = np.fromiter(
            (i for document in documents for i in (*document, tokenizer.end_of_text)), np.int32, sum(lengths)
        )
        borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Tokens(ids, borders, tokenizer.end_of_text, fingerprint)

    def to_bytes(tokens: Tokens) -> bytes:
        stream = io.BytesIO()
        np.savez(stream, ids=tokens.ids, borders=tokens.borders)
        return stream.getvalue()

    def read(data: bytes) -> Tokens:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return Tokens(arrays["ids"], arrays["borders"], tokenizer.end_of_text, fingerprint)

    return cached(f"tokens-{fingerprint}.npz", make, to_bytes, read)
