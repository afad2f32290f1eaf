"""Public sets by a short name, loaded by the optional package `datasets`, from the hub or a local copy."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fmlab.extras import require

_TITLE = re.compile(r"^ = [^=](.*[^=])? = $")  # an article of WikiText begins with " = Title = "


@dataclass(frozen=True)
class PublicSet:
    """Where a set is. `documents` turns the rows of its text column into documents."""

    location: str
    config: str | None = None
    revision: str | None = None
    column: str = "text"
    documents: Callable[[Iterable[str]], list[str]] = list


def articles(lines: Iterable[str]) -> list[str]:
    """WikiText's rows are lines; an article goes from one title to the next."""
    found: list[list[str]] = []
    for line in lines:
        if _TITLE.match(line.rstrip("\n")) or not found:
            found.append([])
        found[-1].append(line if line.endswith("\n") else line + "\n")
    return [text for article in found if (text := "".join(article)).strip()]


PUBLIC = {
    "wikitext-2": PublicSet("Salesforce/wikitext", "wikitext-2-raw-v1", documents=articles),
    # The set itself is a script, which `datasets` no longer runs; this is the hub's own copy of what it made.
    "tiny-shakespeare": PublicSet("karpathy/tiny_shakespeare", revision="refs/convert/parquet"),
    "cifar10": PublicSet("uoft-cs/cifar10"),
}


def load_table(name: str, split: str, folder: str | None = None) -> Any:
    """A set of PUBLIC as a `datasets` table; `folder` is a local copy instead of the hub."""
    wanted = PUBLIC[name]
    if folder is not None:
        return load_hub(folder, None, split)
    return load_hub(wanted.location, wanted.config, split, wanted.revision)


def load_hub(location: str, config: str | None, split: str, revision: str | None = None) -> Any:
    """datasets.load_dataset, with a message that says what else there is when it cannot be reached."""
    datasets = require("hf", "datasets")
    options = {} if revision is None else {"revision": revision}
    try:
        return datasets.load_dataset(location, config, split=split, **options)
    except (ConnectionError, OSError) as error:
        raise ConnectionError(
            f"could not load {location!r}: {error}. Without a connection use a corpus that needs none "
            "(python-docs, python-source, docstrings), or a local file"
        ) from error
