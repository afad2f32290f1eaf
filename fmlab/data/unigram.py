"""Unigram language-model pieces (Kudo 2018) over text whose spaces are written ▁, as SentencePiece does
(Kudo and Richardson 2018) and T5 uses it (Raffel et al. 2020, section 2.2).

Each piece has a probability; a word is cut in the way whose pieces have the largest product.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fmlab.data.tokenizer import TextTokenizer, framing
from fmlab.data.training import check_vocab_size, count_words, training_texts

SPACE = "▁"  # U+2581, not an underscore


class Unigram(TextTokenizer):
    """T5's tokenizer: <pad> </s> <unk> are 0, 1, 2; the sentinels <extra_id_0>, <extra_id_1>, ... are the
    last token, the one before it, and so on. A row is text </s>, a pair a </s> b </s>.

    sentinels: their ids in the order in which a span-corrupted text uses them, so descending

    What does not come back from decode(encode(s)): runs of white space become one space and those at the ends
    are dropped, characters become their NFKC form, ▁ becomes a space, unknown characters <unk>. Everything
    else does: decode(encode(s)) == " ".join(nfkc(s).split()).
    """

    SPECIAL: ClassVar[dict[str, str]] = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
    CLOSING = "eos"
    FRAME = ((), ("eos",), ("eos",))
    ROLES: ClassVar[dict[str, str]] = {f"{name}_token": name for name in SPECIAL}
    eos: int
    unk: int

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a Unigram tokenizer. Raises ValueError when it is of another kind."""
        super().__init__(tokenizer)
        self.sentinels: list[int] = []
        while (index := tokenizer.token_to_id(sentinel_token(len(self.sentinels)))) is not None:
            self.sentinels.append(index)

    def _check(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.model, models.Unigram):
            kind = type(tokenizer.model).__name__
            raise ValueError(
                f"not a Unigram tokenizer but {kind}; T5's tokenizer.json is one, or train one with "
                "Unigram.train"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 4096, sentinels: int = 100) -> "Unigram":
        """Learn pieces from `texts`. The same texts in the same order give the same tokenizer.

        vocab_size counts <pad> </s> <unk> and the sentinels; little text gives fewer pieces.
        Raises ValueError when vocab_size is too small or there is no text.
        """
        smallest = len(cls.SPECIAL) + sentinels + 1
        check_vocab_size(vocab_size, smallest, f"3 special tokens, {sentinels} sentinels and a piece")
        texts = training_texts(texts)
        trainer = trainers.UnigramTrainer(
            vocab_size=vocab_size - sentinels,
            special_tokens=list(cls.SPECIAL.values()),
            unk_token=cls.SPECIAL["unk"],
            show_progress=False,
        )
        tokenizer = Tokenizer(models.Unigram())
        _sentencepiece_rules(tokenizer)
        try:
            tokenizer.train_from_iterator(texts, trainer)
        except Exception as error:  # the library raises plain Exception
            letters = len(set().union(*count_words(tokenizer, texts)))
            raise ValueError(
                f"{error}: each of the text's {letters} different characters is a piece, besides "
                f"{smallest - 1} special tokens; legal: vocab_size above {letters + smallest - 1}"
            ) from error
        pieces = set(tokenizer.get_vocab()) - set(cls.SPECIAL.values())
        return cls(_with_scores(_log_probabilities(pieces, count_words(tokenizer, texts)), sentinels))

    @property
    def lowest_sentinel(self) -> int:
        """The id of the last sentinel; from it on, ids are sentinels."""
        return min(self.sentinels, default=self.vocab_size)

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same pieces, with special ones under names that no text can hold (words have no space).

        The special tokens are pieces of the model, here as in T5's file, and would be found in plain text.
        """
        rules = json.loads(self.to_json())
        special = {
            rules["model"]["vocab"][i][0] for i in self.special_ids if i < len(rules["model"]["vocab"])
        }
        pieces = rules["model"]["vocab"]
        rules["model"]["vocab"] = [[f" {t}" if t in special else t, score] for t, score in pieces]
        return Tokenizer.from_str(json.dumps(rules | {"added_tokens": [], "post_processor": None}))

    def starts_word(self) -> NDArray[np.bool_]:
        """A token begins a word if it starts with ▁ or is special."""
        starts = np.zeros(self.vocab_size, dtype=bool)
        for token, index in self._tokenizer.get_vocab().items():
            starts[index] = token.startswith(SPACE) or index in self.special_ids
        return starts

    def __repr__(self) -> str:
        return super().__repr__().replace(", fingerprint", f", {len(self.sentinels)} sentinels, fingerprint")


def sentinel_token(number: int) -> str:
    """The text of sentinel `number`."""
    return f"<extra_id_{number}>"


def _sentencepiece_rules(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)


def _log_probabilities(pieces: set[str], words: Counter[str]) -> dict[str, float]:
    """The logarithm of each piece's probability when every word is cut in its likeliest way.

    The library's trainer adds up in the order of a hash map that differs from run to run: it finds the same
    pieces but other last digits, and with them now and then another cut. So the probabilities are counted
    once more, from how often each piece stands anywhere in a word, then from how often it is used.
    """
    longest = max(map(len, pieces))
    counts: Counter[str] = Counter()
    for word, times in words.items():
        for i in range(len(word)):
            for j in range(i + 1, min(len(word), i + longest) + 1):
                if word[i:j] in pieces:
                    counts[word[i:j]] += times
    scores = _log_shares(pieces, counts)
    for _ in range(4):  # it settles after three or four rounds
        model = models.Unigram([(Unigram.SPECIAL["unk"], 0.0), *scores.items()], 0, False)
        counts = Counter()
        for word, times in words.items():
            for token in model.tokenize(word):
                counts[token.value] += times
        scores = _log_shares(pieces, counts)
    return scores


def _log_shares(pieces: set[str], counts: Counter[str]) -> dict[str, float]:
    """The pieces, the most frequent first; one that is never used counts as a tenth of a use."""
    total = sum(counts[piece] for piece in pieces)
    order = sorted(pieces, key=lambda piece: (-counts[piece], piece))
    return {piece: round(math.log((counts[piece] or 0.1) / total), 6) for piece in order}


def _with_scores(scores: dict[str, float], sentinels: int) -> Tokenizer:
    """A tokenizer with these pieces between the special tokens and, as in T5's own file among the pieces
    themselves, the sentinels, the highest number first.
    """
    names = [sentinel_token(number) for number in reversed(range(sentinels))]
    special = [*Unigram.SPECIAL.values(), *names]
    first, last = [(token, 0.0) for token in Unigram.SPECIAL.values()], [(name, 0.0) for name in names]
    tokenizer = Tokenizer(models.Unigram([*first, *scores.items(), *last], special.index("<unk>"), False))
    _sentencepiece_rules(tokenizer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.post_processor = framing(Unigram, tokenizer)
    return tokenizer
