"""Keeping a part for validation, by a hash of what must not be on both sides."""

import hashlib
import re
from collections.abc import Sequence


def held_out(keys: Sequence[str], fraction: float, sizes: Sequence[int] | None = None) -> list[bool]:
    """For each item whether it is held out. Items with the same key are on the same side.

    keys:     what must not be on both sides; the choice depends on their hashes alone, not on order or a seed
    fraction: of the total size that is held out, reached or passed by the last item
    sizes:    of the items; default: 1 each
    Raises ValueError when `fraction` is not between 0 and 1, or nothing would be left on one side.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation must be between 0 and 1, got {fraction}")
    sizes = [1] * len(keys) if sizes is None else sizes
    totals: dict[str, int] = {}
    for key, size in zip(keys, sizes, strict=True):
        totals[key] = totals.get(key, 0) + size
    if len(totals) < 2:
        raise ValueError("there are too few different items to keep a part of them for validation")
    order = sorted(totals, key=lambda key: hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest())
    chosen: set[str] = set()
    taken, target = 0, fraction * sum(sizes)
    for key in order[:-1]:
        if taken >= target:
            break
        chosen.add(key)
        taken += totals[key]
    return [key in chosen for key in keys]


def words_only(text: str) -> str:
    """A text without case, punctuation and white space: equal for texts that differ in nothing else."""
    return " ".join(re.findall(r"\w+", text.lower()))
