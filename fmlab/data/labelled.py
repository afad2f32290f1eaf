"""Texts with a class each, for classification: docstrings of the standard library, labelled by module."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fmlab.data.card import card
from fmlab.data.corpus import Corpus
from fmlab.data.holding_out import held_out, words_only

#: Class -> file or folder of the standard library; each has more than a hundred docstrings.
MODULES = {
    "asyncio": "asyncio",
    "decimal": "_pydecimal.py",
    "email": "email",
    "http": "http",
    "importlib": "importlib",
    "logging": "logging",
    "multiprocessing": "multiprocessing",
    "turtle": "turtle.py",
    "unittest": "unittest",
    "xml": "xml",
}
SHORTEST = 5  # words; shorter ones ("Return the name.") could belong anywhere


@dataclass(frozen=True, repr=False)
class LabelledTexts(Corpus):
    """A corpus whose document i belongs to class classes[labels[i]]."""

    labels: list[int]
    classes: list[str]

    def split(self, validation: float = 0.2) -> tuple["LabelledTexts", "LabelledTexts"]:
        """Two parts, for training and for validation. Texts that differ only in case, punctuation or white
        space are on the same side; the choice depends on the texts alone.

        Raises ValueError when `validation` is not between 0 and 1 or there are too few texts.
        """
        out = held_out([words_only(text) for text in self.documents], validation)
        return self._part(out, False, self.name), self._part(out, True, f"{self.name} (validation)")

    def _part(self, out: list[bool], side: bool, name: str) -> "LabelledTexts":
        places = [i for i, is_out in enumerate(out) if is_out == side]
        documents = [self.documents[i] for i in places]
        return replace(self, name=name, documents=documents, labels=[self.labels[i] for i in places])

    def count(self, label: int) -> int:
        """How many texts a class has."""
        return self.labels.count(label)

    def __repr__(self) -> str:
        return (
            f"LabelledTexts({self.name!r}, {len(self.documents):,} documents, {len(self.classes)} classes, "
            f"fingerprint {self.fingerprint})"
        )


def docstrings() -> LabelledTexts:
    """The docstrings of ten modules of the standard library, each labelled by its module.

    A docstring that stands in several modules is left out, one that stands in a module twice is kept once.
    """
    documents, modules = _owned()
    classes = [module for module in MODULES if module in modules]
    labels = [classes.index(module) for module in modules]
    return LabelledTexts("docstrings", list(documents), card("docstrings"), labels, classes)


@cache
def _owned() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The docstrings that stand in one module only, and that module; parsing the sources takes seconds."""
    root = Path(sysconfig.get_paths()["stdlib"])
    owners: dict[str, set[str]] = {}
    texts: dict[str, str] = {}
    for module, path in MODULES.items():
        for text in _docstrings(root / path):
            key = words_only(text)
            if len(key.split()) >= SHORTEST:
                owners.setdefault(key, set()).add(module)
                texts.setdefault(key, text)
    kept = {texts[key]: next(iter(modules)) for key, modules in owners.items() if len(modules) == 1}
    return tuple(kept), tuple(kept.values())


def _docstrings(path: Path) -> Iterator[str]:
    """Of the modules, classes and functions in a file or folder; nothing if it is not there."""
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text
