"""Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes: Radford et al. 2019, section 2.2).

Text is cut into words by GPT-2's pattern, each word into its UTF-8 bytes, and the most frequent pairs are
merged. Since every byte is a token, every string can be written and comes back unchanged.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fmlab.data.cache import cached
from fmlab.storage import write_atomic

END_OF_TEXT = "<|endoftext|>"
ALPHABET = 256  # one token a byte


class ByteBPE:
    """A byte-level BPE tokenizer with one special token, <|endoftext|>.

    decode(encode(s)) == s for every string s that can be written in UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a tokenizer of the `tokenizers` library. Raises ValueError when it is not byte-level BPE."""
        vocabulary = tokenizer.get_vocab()
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary)
        if missing:
            raise ValueError(
                f"not a byte-level tokenizer: {len(missing)} of the {ALPHABET} bytes have no token; "
                "GPT-2's files are such a tokenizer, or train one with ByteBPE.train"
            )
        if END_OF_TEXT not in vocabulary:
            raise ValueError(
                f"the tokenizer has no {END_OF_TEXT!r} token; add it before saving the tokenizer"
            )
        self._tokenizer = tokenizer
        self.end_of_text: int = vocabulary[END_OF_TEXT]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 4096) -> "ByteBPE":
        """Learn merges from `texts`. The same texts in the same order give the same tokenizer.

        vocab_size counts the 256 bytes and the special token; little text gives fewer.
        Raises ValueError when vocab_size is too small or there is no text.
        """
        if vocab_size < ALPHABET + 1:
            raise ValueError(
                f"vocab_size must be at least {ALPHABET + 1} (256 bytes and {END_OF_TEXT}), got {vocab_size}"
            )
        texts = [_encodable(text) for text in texts]
        if not any(texts):
            raise ValueError("no text to train a tokenizer on")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[END_OF_TEXT],
            show_progress=False,
        )
        tokenizer = _byte_level(models.BPE())
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def train_cached(cls, texts: Sequence[str], vocab_size: int = 4096) -> "ByteBPE":
        """`train`, with the result kept in the user's cache folder under a hash of all that goes in."""
        digest = hashlib.sha256(f"{tokenizers.__version__} {vocab_size}".encode())
        for text in texts:
            digest.update(hashlib.sha256(_encodable(text).encode()).digest())
        return cached(
            f"tokenizer-{digest.hexdigest()[:24]}.json",
            make=lambda: cls.train(texts, vocab_size),
            to_bytes=lambda tokenizer: tokenizer.to_json().encode(),
            read=lambda data: cls(Tokenizer.from_str(data.decode())),
        )

    @classmethod
    def load(cls, path: str | Path) -> "ByteBPE":
        """Load a tokenizer.json, or a folder with one, or with GPT-2's vocab.json and merges.txt.

        Raises ValueError when there is none, or it is not byte-level BPE.
        """
        path = Path(path)
        file = path if path.is_file() else path / "tokenizer.json"
        vocabulary, merges = path / "vocab.json", path / "merges.txt"
        try:
            if file.exists():
                return cls(Tokenizer.from_file(str(file)))
            if vocabulary.exists() and merges.exists():
                return cls(_byte_level(models.BPE.from_file(str(vocabulary), str(merges))))
        except ValueError:
            raise
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            raise ValueError(f"{path} does not hold a tokenizer: {error}") from error
        raise ValueError(f"{path} holds neither tokenizer.json nor vocab.json with merges.txt")

    def save(self, path: str | Path) -> Path:
        """Write tokenizer.json into the folder `path` (made if need be), as transformers reads it."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "tokenizer.json", self.to_json().encode())
        config: dict[str, str | bool] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_atomic(folder / "tokenizer_config.json", json.dumps(config, indent=2).encode())
        return folder

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def vocab_size(self) -> int:
        """Number of tokens: bytes, merges and the special token."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the vocabulary, the merges and the rules."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`. With special=False, "<|endoftext|>" in the text is plain characters."""
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Token ids of each text. Raises ValueError for a string that UTF-8 cannot write."""
        self._tokenizer.encode_special_tokens = not special
        encoded = self._tokenizer.encode_batch_fast([_encodable(t) for t in texts], add_special_tokens=False)
        return [entry.ids for entry in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are not UTF-8, as when a character is cut, become U+FFFD."""
        ids = [int(i) for i in ids]
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(f"no such token: {bad[0]}; legal: 0 to {self.vocab_size - 1}")
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def pieces(self, text: str) -> list[str]:
        """The text of each token, for showing how a text is cut."""
        return [self.decode([i]) for i in self.encode(text)]

    def __repr__(self) -> str:
        return f"ByteBPE(vocab_size={self.vocab_size}, fingerprint={self.fingerprint!r})"


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds half of a surrogate pair at position {error.start}, which is not Unicode text; "
            "clean it with text.encode('utf-8', 'replace').decode()"
        ) from error
    return text
