"""Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes: Radford et al. 2019, section 2.2).

Text is cut into words by GPT-2's pattern, each word into its UTF-8 bytes, and the most frequent pairs are
merged. Since every byte is a token, every string can be written and comes back unchanged.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fmlab.data.tokenizer import TextTokenizer, framing
from fmlab.data.training import check_vocab_size, training_texts

END_OF_TEXT = "<|endoftext|>"
ALPHABET = 256  # one token a byte

B = TypeVar("B", bound="ByteBPE")


class ByteBPE(TextTokenizer):
    """A byte-level BPE tokenizer with one special token, <|endoftext|>, as GPT-2 has it.

    decode(encode(s)) == s for every string s that can be written in UTF-8.
    """

    SPECIAL: ClassVar[dict[str, str]] = {"end_of_text": END_OF_TEXT}
    ROLES: ClassVar[dict[str, str]] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "end_of_text")

    def _check(self, tokenizer: Tokenizer) -> None:
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - set(tokenizer.get_vocab())
        if missing:
            raise ValueError(
                f"not a byte-level tokenizer: {len(missing)} of the {ALPHABET} bytes have no token; "
                "GPT-2's files are such a tokenizer, or train one with ByteBPE.train"
            )

    @classmethod
    def train(cls: type[B], texts: Iterable[str], vocab_size: int = 4096) -> B:
        """Learn merges from `texts`. The same texts in the same order give the same tokenizer.

        vocab_size counts the 256 bytes and the special tokens; little text gives fewer.
        Raises ValueError when vocab_size is too small or there is no text.
        """
        first, last = cls._special_order()
        smallest = ALPHABET + len(first) + len(last)
        check_vocab_size(vocab_size, smallest, f"{ALPHABET} bytes and {' '.join((*first, *last))}")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(last),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=first,
            show_progress=False,
        )
        tokenizer = Tokenizer(models.BPE())
        _byte_level(tokenizer)
        tokenizer.train_from_iterator(training_texts(texts), trainer)
        return cls(cls._finished(tokenizer))

    @classmethod
    def _special_order(cls) -> tuple[list[str], list[str]]:
        """The special tokens before and after the learnt ones."""
        return [END_OF_TEXT], []

    @classmethod
    def _finished(cls, tokenizer: Tokenizer) -> Tokenizer:
        first, last = cls._special_order()
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in first + last])
        return tokenizer

    @classmethod
    def _from_vocabulary(cls, folder: Path) -> Tokenizer | None:
        vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
        if not (vocabulary.exists() and merges.exists()):
            return None
        tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
        _byte_level(tokenizer)
        return cls._finished(tokenizer)

    @classmethod
    def _older_files(cls) -> str:
        return "vocab.json with merges.txt"

    def pieces(self, text: str) -> list[str]:
        """The text of each token, for showing how a text is cut."""
        return [self.decode([i]) for i in self.encode(text)]

    def starts_word(self) -> NDArray[np.bool_]:
        """A token begins a word where its first byte is a space or a line break, or it is special."""
        stand_ins = tuple(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" \n")[0][0])
        starts = np.zeros(self.vocab_size, dtype=bool)
        for token, index in self._tokenizer.get_vocab().items():
            starts[index] = token.startswith(stand_ins) or index in self.special_ids
        return starts


class RoBERTaBPE(ByteBPE):
    """The same with RoBERTa's five special tokens (Liu et al. 2019): <s> <pad> </s> <unk> come first, <mask>
    last; a row is <s> text </s>, a pair <s> a </s></s> b </s>, and there are no token types.
    """

    SPECIAL: ClassVar[dict[str, str]] = {
        "cls": "<s>",
        "pad": "<pad>",
        "sep": "</s>",
        "unk": "<unk>",
        "mask": "<mask>",
    }
    CLOSING = "sep"
    FRAME = (("cls",), ("sep", "sep"), ("sep",))
    ROLES: ClassVar[dict[str, str]] = {
        "bos_token": "cls",
        "cls_token": "cls",
        "eos_token": "sep",
        "sep_token": "sep",
        "pad_token": "pad",
        "unk_token": "unk",
        "mask_token": "mask",
    }
    cls: int
    sep: int
    unk: int
    mask: int

    @classmethod
    def _special_order(cls) -> tuple[list[str], list[str]]:
        return ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]

    @classmethod
    def _finished(cls, tokenizer: Tokenizer) -> Tokenizer:
        tokenizer = super()._finished(tokenizer)
        tokenizer.post_processor = framing(cls, tokenizer)
        return tokenizer


def _byte_level(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
