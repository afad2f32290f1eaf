"""English with French or Chinese: the texts of JupyterLab's menus, messages and settings, and their
translations by its community.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from fmlab.data.card import card
from fmlab.data.text_pairs import TextPairs
from fmlab.extras import require

#: Name -> locale of the language pack.
LANGUAGES = {"en-fr": "fr_FR", "en-zh": "zh_CN"}
PLACEHOLDER = re.compile(r"%\d|%[sd]|\{\w*\}|\$\{\w+\}")  # "%1" stands for what is filled in
_CONTEXT = "\x04"  # in a catalogue, "menu\x04File" is "File" as it is meant in a menu


def load_parallel(name: str = "en-fr") -> TextPairs:
    """Texts of JupyterLab and its extensions in English and in French ("en-fr") or Chinese ("en-zh").

    Each pair is there once, with its placeholders; a text may have several translations, which then stand on
    the same side of `split`. Texts that are not translated are left out.
    Raises ValueError for an unknown name, ImportError when the language pack is not installed (extra "data").
    """
    if name not in LANGUAGES:
        raise ValueError(f"unknown languages {name!r}; legal: {', '.join(LANGUAGES)}")
    locale = LANGUAGES[name]
    package = require("data", f"jupyterlab_language_pack_{locale}")
    folder = Path(next(iter(package.__path__))) / "locale" / locale / "LC_MESSAGES"
    pairs: dict[tuple[str, str], None] = {}  # a dict keeps order and drops repetitions
    for catalogue in sorted(folder.glob("*.json")):
        for pair in _entries(json.loads(catalogue.read_text("utf-8"))):
            pairs.setdefault(pair, None)
    firsts, seconds = zip(*pairs, strict=True)
    return TextPairs(name, list(firsts), list(seconds), card(name))


def _entries(catalogue: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Text and translation (of the singular) of each entry that says something in both languages."""
    for key, translations in catalogue.items():
        text = key.rpartition(_CONTEXT)[2].strip()
        translation = translations[0].strip() if isinstance(translations, list) else ""
        if not (text and translation) or text == translation:
            continue  # the header, what is not translated, and what is the same in both, such as names
        if sorted(PLACEHOLDER.findall(text)) == sorted(PLACEHOLDER.findall(translation)):
            yield text, translation
