"""A corpus: a list of documents with a card, and how a part is kept for validation."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from fmlab.data.holding_out import held_out


@dataclass(frozen=True)
class Corpus:
    """A list of documents. `card` says in Markdown where they come from and under which terms."""

    name: str
    documents: list[str]
    card: str

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change with any change of the text or its order."""
        return fingerprint(self.documents)

    @property
    def num_characters(self) -> int:
        """Characters of all documents together."""
        return sum(map(len, self.documents))

    def split(self, validation: float = 0.05) -> tuple["Corpus", "Corpus"]:
        """Two corpora, for training and for validation, with `validation` of the text in the second.

        Whole documents are taken, chosen by a hash of their text: the choice does not depend on order or
        on a seed. A corpus of one document is cut near its end, at a line break.
        Raises ValueError when `validation` is not between 0 and 1, or nothing is left to train on.
        """
        if not 0 < validation < 1:
            raise ValueError(f"validation must be between 0 and 1, got {validation}")
        if len(self.documents) == 1:
            train, held = _cut(self.documents[0], validation)
        else:
            out = held_out(self.documents, validation, [len(text) for text in self.documents])
            train = [text for text, is_out in zip(self.documents, out, strict=True) if not is_out]
            held = [text for text, is_out in zip(self.documents, out, strict=True) if is_out]
        if not train or not held:
            raise ValueError(f"corpus {self.name!r} is too small to keep a part of it for validation")
        return Corpus(self.name, train, self.card), Corpus(f"{self.name} (validation)", held, self.card)

    def __repr__(self) -> str:
        return (
            f"Corpus({self.name!r}, {len(self.documents):,} documents, {self.num_characters:,} characters, "
            f"fingerprint {self.fingerprint})"
        )


def fingerprint(texts: Iterable[str]) -> str:
    """Twelve hexadecimal digits that change with any change of the texts, their borders or their order."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:12]


def _cut(text: str, fraction: float) -> tuple[list[str], list[str]]:
    border = text.rfind("\n", 0, round(len(text) * (1 - fraction))) + 1
    return [part for part in [text[:border]] if part], [part for part in [text[border:]] if part]
