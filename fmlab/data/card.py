"""The dataset cards: what is in each corpus, where it comes from, and under which terms."""

import sys
from importlib import resources


def card(name: str) -> str:
    """The card of a corpus, in Markdown; {python} in it is the version of the running Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = resources.files("fmlab.data").joinpath(f"cards/{name}.md").read_text("utf-8")
    return text.replace("{python}", version)
