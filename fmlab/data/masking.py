"""Which tokens a masked language model has to find again, and what it sees in their place.

Devlin et al. 2019, section 3.1: 15 % of the tokens are targets; of these 80 % are shown as the mask token,
10 % as a random token and 10 % as they are.

Shapes: l tokens of one row.
"""

import numpy as np
from numpy.typing import NDArray

from fmlab.data.batch import IGNORE
from fmlab.data.tokenizer import TextTokenizer

Ids = NDArray[np.int64]


class Masking:
    """Turns one row of ids into inputs and labels. Special tokens and padding are never chosen or inserted.

    tokenizer:   one with a mask token: WordPiece or RoBERTaBPE
    rate:        share of the ordinary tokens that become targets; rounded at random up or down so that it
                 holds on average, and at least one a row
    shown:       share of the targets shown as the mask token; half of the others are shown as a random
                 ordinary token, half as they are
    whole_words: choose all pieces of a word or none (BERT's later releases)
    """

    def __init__(
        self, tokenizer: TextTokenizer, rate: float = 0.15, shown: float = 0.8, whole_words: bool = False
    ) -> None:
        """Raises ValueError for a rate or share out of range or a tokenizer without a mask token."""
        if not 0 < rate < 1:
            raise ValueError(f"mask rate must be between 0 and 1, got {rate}; BERT's is 0.15")
        if not 0 <= shown <= 1:
            raise ValueError(f"shown must be from 0 to 1, got {shown}; BERT's is 0.8")
        if not hasattr(tokenizer, "mask"):
            raise ValueError(
                f"a {type(tokenizer).__name__} has no mask token; masked language models take WordPiece "
                "or RoBERTaBPE"
            )
        self.rate, self.shown, self.whole_words = rate, shown, whole_words
        self.mask: int = tokenizer.mask
        self.vocab_size = tokenizer.vocab_size
        special = np.zeros(tokenizer.vocab_size, dtype=bool)
        special[list(tokenizer.special_ids)] = True
        self._special, self._ordinary = special, np.flatnonzero(~special)
        self._starts = tokenizer.starts_word()

    def __call__(self, ids: Ids, random: np.random.Generator) -> tuple[Ids, Ids]:
        """ids [l] -> inputs [l], labels [l], which are -100 where nothing is to be found."""
        labels = np.full_like(ids, IGNORE)
        eligible = np.flatnonzero(~self._special[ids])
        if not len(eligible):
            return ids.copy(), labels
        count = max(1, int(self.rate * len(eligible) + random.random()))
        if self.whole_words:
            targets = self._words(ids, eligible, count, random)
        else:
            targets = random.choice(eligible, count, replace=False)
        labels[targets] = ids[targets]
        return self._show(ids, targets, random), labels

    def _show(self, ids: Ids, targets: Ids, random: np.random.Generator) -> Ids:
        dice = random.random(len(targets))
        others = random.choice(self._ordinary, len(targets))
        seen = np.where(dice < self.shown, self.mask, ids[targets])
        seen = np.where((dice >= self.shown) & (dice < (1 + self.shown) / 2), others, seen)
        inputs = ids.copy()
        inputs[targets] = seen
        return inputs

    def _words(self, ids: Ids, eligible: Ids, count: int, random: np.random.Generator) -> Ids:
        """Words in random order as long as they fit into `count`; the first is taken however long it is."""
        follows = np.diff(eligible, prepend=-2) == 1  # a special token in between ends a word, too
        first = np.flatnonzero(self._starts[ids[eligible]] | ~follows)
        words = np.split(eligible, first[1:])
        chosen: list[Ids] = []
        taken = 0
        for index in random.permutation(len(words)):
            word = words[index]
            if not chosen or taken + len(word) <= count:
                chosen.append(word)
                taken += len(word)
            if taken >= count:
                break
        return np.concatenate(chosen)

    def __repr__(self) -> str:
        return f"Masking(rate={self.rate}, shown={self.shown}, whole_words={self.whole_words})"
