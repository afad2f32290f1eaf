"""WordPiece (Schuster and Nakajima 2012), as BERT uses it (Devlin et al. 2019, section 3).

Text is cleaned, cut at spaces and punctuation, and each word is covered from its start by the longest pieces
of the vocabulary; pieces inside a word begin with ##. A word that cannot be covered is [UNK].
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fmlab.data.tokenizer import TextTokenizer, framing
from fmlab.data.training import check_vocab_size, count_words, training_texts
from fmlab.storage import write_atomic


class WordPiece(TextTokenizer):
    """BERT's tokenizer: [CLS] a [SEP], for two texts [CLS] a [SEP] b [SEP] with token types 0 and 1.

    What does not come back from decode(encode(s)): white space (words are joined by one space, also at
    punctuation: "don ' t"), control characters, with lower-casing the case and the accents, and unknown
    words. Encoding what was decoded gives the same ids again.
    """

    SPECIAL: ClassVar[dict[str, str]] = {
        "pad": "[PAD]",
        "unk": "[UNK]",
        "cls": "[CLS]",
        "sep": "[SEP]",
        "mask": "[MASK]",
    }
    CLOSING = "sep"
    FRAME = (("cls",), ("sep",), ("sep",))
    TOKEN_TYPES = True
    ROLES: ClassVar[dict[str, str]] = {f"{name}_token": name for name in SPECIAL}
    unk: int
    cls: int
    sep: int
    mask: int

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a WordPiece tokenizer. Raises ValueError when it is of another kind."""
        super().__init__(tokenizer)
        # The library's clean-up would also remove spaces that stood in the text, as before "?".
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)

    def _check(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.model, models.WordPiece):
            kind = type(tokenizer.model).__name__
            raise ValueError(
                f"not a WordPiece tokenizer but {kind}; BERT's vocab.txt or tokenizer.json is one, "
                "or train one with WordPiece.train"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 4096, lowercase: bool = True) -> "WordPiece":
        """Learn pieces from `texts`. The same texts in the same order give the same tokenizer.

        vocab_size counts the five special tokens; little text gives fewer pieces. lowercase also strips
        accents, as BERT "uncased" does. Raises ValueError when vocab_size is too small or there is no text.
        """
        check_vocab_size(vocab_size, len(cls.SPECIAL) + 2, "five special tokens and a letter with its ##")
        tokenizer = Tokenizer(models.WordPiece(unk_token=cls.SPECIAL["unk"]))
        _bert_rules(tokenizer, lowercase)
        texts = training_texts(texts)
        first, inside = _alphabets(count_words(tokenizer, texts), (vocab_size - len(cls.SPECIAL)) // 2)
        # Letters get their ids in the order of a hash map that differs from run to run, and equally frequent
        # pairs are merged in the order of ids. Tokens given as special ones get theirs as listed.
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=[*cls.SPECIAL.values(), *first, *inside],
            limit_alphabet=0,
            continuing_subword_prefix="##",
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
        return cls(_with_vocabulary(vocabulary, lowercase))

    @classmethod
    def from_vocabulary(cls, tokens: Iterable[str], lowercase: bool = True) -> "WordPiece":
        """A tokenizer from the tokens in the order of their ids, as in BERT's vocab.txt.

        Raises ValueError when a special token is missing.
        """
        vocabulary = {token: index for index, token in enumerate(tokens)}
        return cls(_with_vocabulary(vocabulary, lowercase))

    @classmethod
    def _from_vocabulary(cls, folder: Path) -> Tokenizer | None:
        file = folder if folder.suffix == ".txt" else folder / "vocab.txt"
        if not file.is_file():
            return None
        lines = file.read_text(encoding="utf-8").split("\n")
        vocabulary = {token.rstrip("\r"): i for i, token in enumerate(lines) if token or i < len(lines) - 1}
        # vocab.txt does not say it, but a vocabulary for lower-cased text holds no capital letter.
        capitals = set("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        cased = any(capitals & set(token) for token in vocabulary if not token.startswith("["))
        return _with_vocabulary(vocabulary, lowercase=not cased)

    @classmethod
    def _older_files(cls) -> str:
        return "vocab.txt"

    def _save_vocabulary(self, folder: Path) -> None:
        tokens = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        write_atomic(folder / "vocab.txt", "".join(f"{token}\n" for token, _ in tokens).encode())

    def starts_word(self) -> NDArray[np.bool_]:
        """A token begins a word unless it starts with ##."""
        starts = np.ones(self.vocab_size, dtype=bool)
        for token, index in self._tokenizer.get_vocab().items():
            starts[index] = not token.startswith("##")
        return starts


def _bert_rules(tokenizer: Tokenizer, lowercase: bool) -> None:
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _alphabets(words: Counter[str], limit: int) -> tuple[list[str], list[str]]:
    """Letters that begin words and, marked with ##, letters inside words, in a fixed order: at most `limit`
    of the two together (and 1000 letters, as BERT has it), the most frequent ones.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        counts[word[0]] += count
        for letter in word[1:]:
            counts[f"##{letter}"] += count
    chosen = sorted(counts, key=lambda token: (-counts[token], token))[: min(limit, 2000)]
    return sorted(t for t in chosen if len(t) == 1), sorted(t for t in chosen if len(t) > 1)


def _with_vocabulary(vocabulary: dict[str, int], lowercase: bool) -> Tokenizer:
    missing = [token for token in WordPiece.SPECIAL.values() if token not in vocabulary]
    if missing:
        raise ValueError(f"the vocabulary has no {', '.join(missing)}; BERT's vocab.txt has all five")
    model = models.WordPiece(vocabulary, unk_token=WordPiece.SPECIAL["unk"], max_input_chars_per_word=100)
    tokenizer = Tokenizer(model)
    _bert_rules(tokenizer, lowercase)
    return _finished(tokenizer)


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    special = [AddedToken(t, special=True, normalized=False) for t in WordPiece.SPECIAL.values()]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = framing(WordPiece, tokenizer)
    return tokenizer
