"""The sections of Python's language reference, with their titles: something to search in."""

from fmlab.data import python_corpora
from fmlab.data.card import card
from fmlab.data.text_pairs import TextPairs


def load_passages() -> TextPairs:
    """Title and text of each section, each text once: a retriever should find the text from the title."""
    titles, texts = zip(*python_corpora.passages(), strict=True)
    return TextPairs("python-passages", list(titles), list(texts), card("python-passages"))
