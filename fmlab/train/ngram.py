"""An n-gram language model by interpolated Kneser-Ney smoothing: what a neural one has to beat on equal text.

The probability of token w after the context h of n - 1 tokens (Chen and Goodman 1998, TR-10-98, section 3):

    p_n(w | h) = (max(c(hw) - D, 0) + g(h) p_(n-1)(w | h without its oldest token)) / c(h)

Only the longest n-grams are counted as they occur. Of a shorter one counts *after how many different tokens*
it occurs: "Francisco" is frequent, but follows San alone. The discount D of a count of 1, 2, and 3 or more is
estimated from how many n-grams occur 1, 2, 3 and 4 times; g(h) is what was discounted after h, and the
shortest model is uniform over the vocabulary, so that no token is ever impossible.

    model = KneserNey.fit(training_ids, order=5, vocab_size=512)
    model.nats(validation_ids).sum() / math.log(2) / num_bytes      # bits per byte

Everything is sorted arrays: an n-gram is one whole number, its tokens the digits in base vocab_size, oldest
first. So the context of an n-gram is number // vocab_size, its n - 1 last tokens number % vocab_size**(n -
1).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Discounts where the counts of counts give none: lmplz's, of KenLM, with --discount_fallback.
FALLBACK = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Level:
    """The n-grams of one length, sorted, and the contexts that they have in common, sorted too.

    kept:  of each n-gram its count less the discount
    total: of each context the counts of its n-grams, together
    freed: of each context the discounts of its n-grams, together
    """

    grams: Integers
    kept: Floats
    contexts: Integers
    total: Floats
    freed: Floats
    discounts: tuple[float, float, float]


@dataclass(frozen=True)
class KneserNey:
    """A model of order n: it reads up to n - 1 tokens. `levels` begin with that of single tokens."""

    vocab_size: int
    levels: tuple[Level, ...]

    @property
    def order(self) -> int:
        return len(self.levels)

    @property
    def num_grams(self) -> int:
        """How many different n-grams of all lengths it holds: its parameters."""
        return sum(len(level.grams) for level in self.levels)

    @classmethod
    def fit(cls, ids: Any, order: int, vocab_size: int) -> "KneserNey":
        """Count the n-grams of a text of token ids, [n], documents closed by their end-of-text token.

        Raises ValueError for an order that is not positive or too long for 63 bits, a text shorter than it,
        and ids outside the vocabulary.
        """
        if vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, got {vocab_size}")
        longest = int(63 / np.log2(vocab_size))
        if not 1 <= order <= longest:
            raise ValueError(f"order={order}: legal for a vocabulary of {vocab_size} are 1 to {longest}")
        tokens = _checked(ids, vocab_size, (1, 2))
        if tokens.shape[-1] < order or not tokens.size:
            raise ValueError(f"{tokens.shape[-1]} tokens are too few for n-grams of {order}")
        grams, counts = np.unique(_windows(tokens, order, vocab_size), return_counts=True)
        levels = [_level(grams, counts, vocab_size)]
        for length in range(order - 1, 0, -1):
            # Each longer n-gram is there once: the shorter ones count the different tokens before them.
            grams, counts = np.unique(grams % vocab_size**length, return_counts=True)
            levels.insert(0, _level(grams, counts, vocab_size))
        return cls(vocab_size, tuple(levels))

    def nats(self, ids: Any) -> Floats:
        """-log p of each token of a text but the first, [n - 1], given up to `order` - 1 tokens before it.

        Raises ValueError for fewer than two tokens, and ids outside the vocabulary.
        """
        tokens = _checked(ids, self.vocab_size, (1,))
        if len(tokens) < 2:
            raise ValueError(f"{len(tokens)} tokens: there is nothing to predict; give two or more")
        p = np.full(len(tokens), 1 / self.vocab_size)
        for length, level in enumerate(self.levels, start=1):
            if length > len(tokens):
                break
            grams = _windows(tokens, length, self.vocab_size)
            at, known = _find(level.contexts, grams // self.vocab_size)
            gram_at, seen = _find(level.grams, grams)
            shorter = p[length - 1 :]
            here = (np.where(seen, level.kept[gram_at], 0.0) + level.freed[at] * shorter) / level.total[at]
            p[length - 1 :] = np.where(known, here, shorter)  # an unknown context tells nothing
        return np.asarray(-np.log(p[1:]), dtype=np.float64)


def _level(grams: Integers, counts: Integers, vocab_size: int) -> Level:
    discounts = _discounts(counts)
    discount = np.asarray(discounts)[np.minimum(counts, 3) - 1]
    contexts, first = np.unique(grams // vocab_size, return_index=True)  # grams are sorted by their contexts
    total, freed = (np.add.reduceat(values.astype(np.float64), first) for values in (counts, discount))
    return Level(grams, counts - discount, contexts, total, freed, discounts)


def _discounts(counts: Integers) -> tuple[float, float, float]:
    """D of counts of 1, 2, and 3 or more: Chen and Goodman's equation for the modified smoothing."""
    n1, n2, n3, n4 = (int((counts == times).sum()) for times in (1, 2, 3, 4))
    if not all((n1, n2, n3, n4)):
        return FALLBACK
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return found if all(0 <= d <= times for times, d in enumerate(found, 1)) else FALLBACK


def _windows(tokens: Integers, length: int, vocab_size: int) -> Integers:
    """The n-gram that ends at each token from the length-th on, as a number; of several pieces one after
    another."""
    places = tokens.shape[-1] - length + 1
    number = np.zeros((*tokens.shape[:-1], places), np.int64)
    for place in range(length):
        number = number * vocab_size + tokens[..., place : place + places]
    return number.ravel()


def _find(known: Integers, wanted: Integers) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Where each wanted number is among the known ones, which are sorted, and whether it is there at all."""
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return at, known[at] == wanted


def _checked(ids: Any, vocab_size: int, dims: tuple[int, ...]) -> Integers:
    tokens = np.asarray(ids)
    if tokens.ndim not in dims or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        shapes = " or ".join(("[n]", "[pieces, n]")[dim - 1] for dim in dims)
        raise ValueError(f"give token ids as whole numbers {shapes}, got {tokens.dtype} {tokens.shape}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"ids go from {tokens.min()} to {tokens.max()}; legal are 0 to {vocab_size - 1}")
    return tokens.astype(np.int64)
