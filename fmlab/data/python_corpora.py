"""The two corpora that every Python brings along: its reference manual and its standard library."""

import re
import sysconfig
from importlib import import_module
from itertools import pairwise
from pathlib import Path

_UNDERLINE = re.compile(r"^([*=\-~^])\1{2,}$")
_SOURCE_LIMIT = 60_000  # bytes of one file; longer ones are mostly tables
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings", "__pycache__"}


def documentation() -> list[str]:
    """The sections of the language reference as `help()` shows it, each a document, without duplicates.

    A section is a title, its underline, and the text up to the next title.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    sections: dict[str, None] = {}  # a dict keeps order and drops sections that several topics share
    for name in sorted(topics):
        for section in _sections(topics[name]):
            if len(section.split()) >= 20:  # shorter ones are bare headings
                sections.setdefault(section, None)
    return list(sections)


def passages() -> list[tuple[str, str]]:
    """The same sections as title and text; a section without a title has that of its topic."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    found: dict[str, str] = {}
    for name in sorted(topics):
        for section in _sections(topics[name]):
            title, _, rest = section.partition("\n")
            underline, _, body = rest.partition("\n")
            if not _UNDERLINE.match(underline):
                title, body = name, section
            if len(body.split()) >= 20:
                found.setdefault(body.strip() + "\n", title.strip())
    return [(title, body) for body, title in found.items()]


def source() -> list[str]:
    """The files of the standard library, each a document, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(file.relative_to(root).parts) and 0 < file.stat().st_size <= _SOURCE_LIMIT:
            documents.append(file.read_text(encoding="utf-8", errors="replace"))
    return documents


def _sections(text: str) -> list[str]:
    lines = text.split("\n")
    starts = [i - 1 for i in range(1, len(lines)) if _UNDERLINE.match(lines[i]) and lines[i - 1].strip()]
    borders = [*sorted({0, *starts}), len(lines)]
    parts = ("\n".join(lines[a:b]) for a, b in pairwise(borders))
    return [cleaned for part in parts if (cleaned := _clean(part))]


def _clean(text: str) -> str:
    """Join lines that the help viewer wrapped with a hyphen, and keep at most one empty line in a row."""
    text = re.sub(r"(\w)-\n(\w)", r"\1-\2", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" if text.strip() else ""
