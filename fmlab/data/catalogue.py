"""Every data set there is, by kind: what `fmlab data list` and docs/data.md show."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fmlab.data.corpora import corpus_names, load
from fmlab.data.images import load_cifar10, load_digits
from fmlab.data.passages import load_passages
from fmlab.data.problems import arithmetic, instructions
from fmlab.data.public import PUBLIC
from fmlab.data.shapes import ShapesDataset
from fmlab.data.translations import LANGUAGES, load_parallel


@dataclass(frozen=True)
class Entry:
    """name: also that of its card. call: how it is loaded. load: does it. online: needs a connection."""

    name: str
    kind: str
    call: str
    load: Callable[[], Any]
    online: bool = False


def _text(name: str) -> Entry:
    kind = "texts with a class" if name == "docstrings" else "text"
    return Entry(name, kind, f'load("{name}")', lambda: load(name), online=name in PUBLIC)


def _parallel(name: str) -> Entry:
    return Entry(name, "pairs of texts", f'load_parallel("{name}")', lambda: load_parallel(name))


CATALOGUE = (
    *map(_text, corpus_names()),
    *map(_parallel, LANGUAGES),
    Entry("text-to-text", "pairs of texts", 'load("text-to-text")', lambda: load("text-to-text")),
    Entry("python-passages", "pairs of texts", "load_passages()", load_passages),
    Entry("instructions", "pairs of texts", "instructions()", instructions),
    Entry("arithmetic", "pairs of texts", "arithmetic(steps=True)", lambda: arithmetic(steps=True)),
    Entry("digits", "images with a class", "load_digits()", load_digits),
    Entry("shapes", "images with a caption", "ShapesDataset()", lambda: ShapesDataset()),
    _text("wikitext-2"),
    _text("tiny-shakespeare"),
    Entry("cifar10", "images with a class", "load_cifar10()", load_cifar10, online=True),
)


def describe(entry: Entry) -> str:
    """One line: what the set looks like here, or what it takes to have it."""
    if entry.online:
        return f"{entry.kind}; from the Hugging Face hub or a local copy"
    try:
        data = entry.load()
    except ImportError as error:
        return f"{entry.kind}; {error}"
    plain = type(data).__repr__ is object.__repr__
    return f"{type(data).__name__}({len(data):,} examples)" if plain else repr(data)
