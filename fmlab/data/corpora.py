"""Text to train on: corpora that every Python has, the learner's own files, and public sets."""

import difflib
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fmlab.data import python_corpora
from fmlab.extras import require

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")


@dataclass(frozen=True)
class Corpus:
    """A list of documents. `card` says in Markdown where they come from and under which terms."""

    name: str
    documents: list[str]
    card: str

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change with any change of the text or its order."""
        digest = hashlib.sha256()
        for document in self.documents:
            data = document.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()[:12]

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
            train, held_out = _cut(self.documents[0], validation)
        else:
            train, held_out = _choose(self.documents, validation)
        if not train or not held_out:
            raise ValueError(f"corpus {self.name!r} is too small to keep a part of it for validation")
        return Corpus(self.name, train, self.card), Corpus(f"{self.name} (validation)", held_out, self.card)

    def __repr__(self) -> str:
        return (
            f"Corpus({self.name!r}, {len(self.documents):,} documents, {self.num_characters:,} characters, "
            f"fingerprint {self.fingerprint})"
        )


_BUILT_IN: dict[str, Callable[[], list[str]]] = {
    "python-docs": python_corpora.documentation,
    "python-source": python_corpora.source,
}


def corpus_names() -> list[str]:
    """The corpora that need no download."""
    return list(_BUILT_IN)


def load(name: str, split: str = "train", column: str = "text") -> Corpus:
    """Load a corpus.

    name: one of `corpus_names()`; a text file, or a folder whose text files are read recursively (one
        document each); or "hub:owner/set" or "hub:owner/set:config" for a set that the optional
        `datasets` package loads, from the Hugging Face hub or from a local folder.
    split, column: which part and which text column of a hub set.

    Raises ValueError for an unknown name or an empty corpus, ImportError when `datasets` is missing,
    ConnectionError when a hub set cannot be reached.
    """
    if name in _BUILT_IN:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        card = resources.files("fmlab.data").joinpath(f"cards/{name}.md").read_text("utf-8")
        return Corpus(name, _BUILT_IN[name](), card.replace("{python}", version))
    if name.startswith("hub:"):
        return _from_hub(name, split, column)
    path = Path(name).expanduser()
    if path.exists():
        return _from_files(path)
    close = difflib.get_close_matches(name, _BUILT_IN, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown corpus {name!r}; legal: {', '.join(_BUILT_IN)}, the path of a text file or folder, or "
        f"hub:owner/set{hint}"
    )


def _from_files(path: Path) -> Corpus:
    files = [path] if path.is_file() else _text_files(path)
    documents = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error}); convert it first") from error
        if text.strip():
            documents.append(text)
    if not documents:
        raise ValueError(f"no text in {path}; a folder needs files ending in {', '.join(TEXT_SUFFIXES)}")
    return Corpus(path.name, documents, f"# {path.name}\n\nYour own text: {len(documents)} document(s).\n")


def _text_files(folder: Path) -> list[Path]:
    """Regular files only: not a folder called notes.md, a pipe, or a link that leads nowhere."""
    return sorted(f for f in folder.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file())


def _from_hub(name: str, split: str, column: str) -> Corpus:
    datasets = require("hf", "datasets")
    location, _, config = name.removeprefix("hub:").partition(":")
    try:
        table = datasets.load_dataset(location, config or None, split=split)
    except (ConnectionError, OSError) as error:
        raise ConnectionError(
            f"could not load {location!r}: {error}. Without a connection use a corpus that needs none: "
            f"{', '.join(_BUILT_IN)}, or a local file"
        ) from error
    if column not in table.column_names:
        raise ValueError(f"{location!r} has no column {column!r}; legal: {', '.join(table.column_names)}")
    documents = [text for text in table[column] if text and text.strip()]
    if not documents:
        raise ValueError(f"no text in column {column!r} of {location!r}, split {split!r}")
    card = f"# {location}\n\nLoaded by `datasets`, split `{split}`. See the set's own page for its terms.\n"
    return Corpus(location, documents, card)


def _choose(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    target = fraction * sum(map(len, documents))
    hashes = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in documents]
    order = sorted(range(len(documents)), key=hashes.__getitem__)
    chosen: set[int] = set()
    taken = 0
    for index in order[:-1]:
        if taken >= target:
            break
        chosen.add(index)
        taken += len(documents[index])
    train = [text for i, text in enumerate(documents) if i not in chosen]
    return train, [documents[i] for i in sorted(chosen)]


def _cut(text: str, fraction: float) -> tuple[list[str], list[str]]:
    border = text.rfind("\n", 0, round(len(text) * (1 - fraction))) + 1
    return [part for part in [text[:border]] if part], [part for part in [text[border:]] if part]
