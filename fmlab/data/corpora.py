"""Text to train on: corpora that every Python has, the learner's own files, and public sets."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fmlab.data import python_corpora
from fmlab.data.card import card
from fmlab.data.corpus import Corpus
from fmlab.data.labelled import docstrings
from fmlab.data.public import PUBLIC, load_hub
from fmlab.data.text_to_text import text_to_text

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")


def _python(name: str, documents: Callable[[], list[str]]) -> Callable[[], Corpus]:
    return lambda: Corpus(name, documents(), card(name))


_BUILT_IN: dict[str, Callable[[], Corpus]] = {
    "python-docs": _python("python-docs", python_corpora.documentation),
    "python-source": _python("python-source", python_corpora.source),
    "docstrings": docstrings,
}
#: Pairs of texts to train on; they need the extra "data".
_PAIRED: dict[str, Callable[[], Corpus]] = {"text-to-text": text_to_text}
_HUB_TEXTS = [name for name in PUBLIC if name != "cifar10"]


def corpus_names() -> list[str]:
    """The corpora of text that need no download."""
    return list(_BUILT_IN)


def load(name: str, split: str = "train", column: str = "text", folder: str | None = None) -> Corpus:
    """Load a corpus of text.

    name: one of `corpus_names()`; "text-to-text", tasks for an encoder-decoder; "wikitext-2" or
        "tiny-shakespeare", public sets by a short name; a text file, or a folder whose text files are read
        recursively (one document each); or "hub:owner/set" or "hub:owner/set:config" for any other set that
        the optional `datasets` package loads, from the Hugging Face hub or from a local folder. Several that
        need no download are joined by a plus sign: "python-docs+python-source".
    split, column: which part of a public set, and which text column of a hub set.
    folder: a local copy of the public set instead of the hub.

    Raises ValueError for an unknown name or an empty corpus, ImportError when `datasets` is missing,
    ConnectionError when a hub set cannot be reached.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    if name in _PAIRED:
        return _PAIRED[name]()
    if name in _HUB_TEXTS:
        return _public(name, split, folder)
    if "+" in name and set(parts := name.split("+")) <= set(_BUILT_IN):
        return _joined(name, parts)
    if name.startswith("hub:"):
        location, _, config = name.removeprefix("hub:").partition(":")
        table = load_hub(location, config or None, split)
        terms = f"Loaded by `datasets`, split `{split}`. See the set's own page for its terms."
        return _of_column(location, table, column, f"# {location}\n\n{terms}\n")
    path = Path(name).expanduser()
    if path.exists():
        return _from_files(path)
    legal = [*_BUILT_IN, *_PAIRED, *_HUB_TEXTS]
    close = difflib.get_close_matches(name, legal, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown corpus {name!r}; legal: {', '.join(legal)}, the path of a text file or folder, or "
        f"hub:owner/set{hint}"
    )


def _joined(name: str, parts: list[str]) -> Corpus:
    if len(set(parts)) < len(parts):
        raise ValueError(f"corpus {name!r} names a text twice; name each once")
    found = [_BUILT_IN[part]() for part in parts]
    documents = [text for corpus in found for text in corpus.documents]
    return Corpus(name, documents, "\n".join(corpus.card for corpus in found))


def _public(name: str, split: str, folder: str | None) -> Corpus:
    wanted = PUBLIC[name]
    where = (wanted.location, wanted.config) if folder is None else (folder, None)
    table = load_hub(*where, split, wanted.revision if folder is None else None)
    found = _of_column(name, table, wanted.column, card(name))
    return Corpus(name, wanted.documents(found.documents), found.card)


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


def _of_column(name: str, table: Any, column: str, text: str) -> Corpus:
    if column not in table.column_names:
        raise ValueError(f"{name!r} has no column {column!r}; legal: {', '.join(table.column_names)}")
    documents = [text for text in table[column] if text and text.strip()]
    if not documents:
        raise ValueError(f"no text in column {column!r} of {name!r}")
    return Corpus(name, documents, text)
