"""What all tokenizers share, whatever family of models they are for.

The work is done by the `tokenizers` library, in Rust; the classes here fix each family's rules, names its
special tokens as attributes, and refuse files of another kind.

Shapes: b texts, l tokens of the longest of them.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from fmlab.data.batch import Batch
from fmlab.data.cache import cached
from fmlab.data.training import encodable
from fmlab.storage import write_atomic

T = TypeVar("T", bound="TextTokenizer")


class TextTokenizer:
    """A text as token ids and back; see ByteBPE, RoBERTaBPE, WordPiece and Unigram.

    `encode` never adds a token; `frame` and `batch` put the family's special tokens around one text or two.

    end_of_text: the token that closes a document
    pad:         the token that fills short rows; families without one use end_of_text
    """

    #: attribute -> text of the special token: `tokenizer.mask` is the id of "[MASK]".
    SPECIAL: ClassVar[dict[str, str]] = {}
    #: The attribute whose token closes a document.
    CLOSING: ClassVar[str] = "end_of_text"
    #: Attributes of the tokens before, between and after the texts of a row.
    FRAME: ClassVar[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = ((), (), ())
    #: Whether rows tell the first text from the second with token_type_ids 0 and 1.
    TOKEN_TYPES: ClassVar[bool] = False
    #: Roles for tokenizer_config.json, as transformers calls them.
    ROLES: ClassVar[dict[str, str]] = {}

    end_of_text: int
    pad: int

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a tokenizer of the `tokenizers` library. Raises ValueError when it is of another kind."""
        tokenizer.no_padding()  # published files may bring both along
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = False
        self._tokenizer = tokenizer
        self._check(tokenizer)
        for attribute, token in self.SPECIAL.items():
            setattr(self, attribute, self._id(token))
        self.end_of_text = getattr(self, self.CLOSING)
        self.pad = getattr(self, "pad", self.end_of_text)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)

    # ---- for a family to say -------------------------------------------------------------------------------

    @classmethod
    def train(cls: type[T], texts: Iterable[str], vocab_size: int = 4096) -> T:
        """Learn a vocabulary from `texts`. The same texts in the same order give the same tokenizer."""
        raise NotImplementedError

    def _check(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError when `tokenizer` is not of this family."""

    @classmethod
    def _from_vocabulary(cls, folder: Path) -> Tokenizer | None:
        """A tokenizer from a folder with the family's older files, or None if they are not there."""
        return None

    def _save_vocabulary(self, folder: Path) -> None:
        """Write the family's older files too, if it has any."""

    def starts_word(self) -> NDArray[np.bool_]:
        """For each token [vocab_size] whether it begins a word, so that words can be masked as a whole."""
        return np.ones(self.vocab_size, dtype=bool)

    # ---- making, loading, saving ---------------------------------------------------------------------------

    @classmethod
    def train_cached(cls: type[T], texts: Sequence[str], vocab_size: int = 4096, **options: Any) -> T:
        """`train`, with the result kept in the user's cache folder under a hash of all that goes in."""
        kind = "" if cls.__name__ == "ByteBPE" else f"{cls.__name__} {sorted(options.items())} "
        digest = hashlib.sha256(f"{kind}{tokenizers.__version__} {vocab_size}".encode())
        for text in texts:
            digest.update(hashlib.sha256(encodable(text).encode()).digest())
        return cached(
            f"tokenizer-{digest.hexdigest()[:24]}.json",
            make=lambda: cls.train(texts, vocab_size, **options),
            to_bytes=lambda tokenizer: tokenizer.to_json().encode(),
            read=lambda data: cls(Tokenizer.from_str(data.decode())),
        )

    @classmethod
    def load(cls: type[T], path: str | Path) -> T:
        """Load a tokenizer.json, or a folder with one or with the family's older files.

        Raises ValueError when there is none, or it is of another family.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() or path.suffix == ".txt" else path
        try:
            if file.is_file():
                return cls(Tokenizer.from_file(str(file)))
            if (tokenizer := cls._from_vocabulary(path)) is not None:
                return cls(tokenizer)
        except ValueError:
            raise
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            raise ValueError(f"{path} does not hold a tokenizer: {error}") from error
        raise ValueError(f"{path} holds neither tokenizer.json nor {cls._older_files()}")

    @classmethod
    def _older_files(cls) -> str:
        return "another file that this family is stored in"

    def save(self, path: str | Path, token_types: bool = True) -> Path:
        """Write the folder `path` (made if need be), as transformers' AutoTokenizer reads it.

        token_types: False for a model that takes none (DistilBERT): transformers then gives it none
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "tokenizer.json", self.to_json().encode())
        config: dict[str, Any] = {role: self.SPECIAL[name] for role, name in self.ROLES.items()}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        names = [
            "input_ids",
            *(["token_type_ids"] if self.TOKEN_TYPES and token_types else []),
            "attention_mask",
        ]
        config["model_input_names"] = names
        write_atomic(folder / "tokenizer_config.json", json.dumps(config, indent=2).encode())
        self._save_vocabulary(folder)
        return folder

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    # ---- size and identity ---------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the vocabulary, the merges and the rules."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    # ---- text to ids and back ------------------------------------------------------------------------------

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`. With special=False a special token written in the text is plain characters."""
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Token ids of each text. Raises ValueError for a string that UTF-8 cannot write."""
        tokenizer = self._reading(special)
        encoded = tokenizer.encode_batch_fast([encodable(t) for t in texts], add_special_tokens=False)
        return [entry.ids for entry in encoded]

    def _reading(self, special: bool) -> Tokenizer:
        """The tokenizer that takes special tokens in a text for what they are, or for plain characters."""
        return self._tokenizer if special else self._plain

    @cached_property
    def _plain(self) -> Tokenizer:
        """A copy that takes special tokens for plain characters: one that is set anew for each text would
        read the text of one thread as another thread has asked for.
        """
        plain = Tokenizer.from_str(self.to_json())
        plain.encode_special_tokens = True
        return plain

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`, with or without the special tokens. Raises ValueError for an unknown id."""
        ids = [int(i) for i in ids]
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(f"no such token: {bad[0]}; legal: 0 to {self.vocab_size - 1}")
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def pieces(self, text: str) -> list[str]:
        """The tokens of `text` as they stand in the vocabulary, for showing how a text is cut."""
        return [cast(str, self._tokenizer.id_to_token(i)) for i in self.encode(text)]

    def frame(
        self, first: Sequence[int], second: Sequence[int] | None = None, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """One row of one text or two with the special tokens around them, and its token types.

        A row longer than max_length loses the last tokens of whichever text is longer. Raises ValueError
        when max_length has no room for a token of each text.
        """
        before, between, after = ([getattr(self, name) for name in names] for names in self.FRAME)
        texts = [list(first)] if second is None else [list(first), list(second)]
        if max_length is not None:
            room = max_length - len(before) - len(after) - (len(between) if second is not None else 0)
            texts = shorten(texts, room)
        if second is None:
            ids = [*before, *texts[0], *after]
            return ids, [0] * len(ids)
        start, rest = [*before, *texts[0], *between], [*texts[1], *after]
        return start + rest, [0] * len(start) + [int(self.TOKEN_TYPES)] * len(rest)

    def batch(
        self,
        texts: Sequence[str],
        seconds: Sequence[str] | None = None,
        max_length: int | None = None,
        special: bool = False,
    ) -> Batch:
        """Rows for a model, padded on the right: input_ids and attention_mask, each [b,l], and for BERT's
        family token_type_ids. `seconds` are the second texts of pairs; max_length cuts rows (see `frame`).

        Raises ValueError when there are no texts or not as many second texts as first.
        """
        if not texts or (seconds is not None and len(seconds) != len(texts)):
            raise ValueError(
                f"{len(texts)} texts and {len(seconds or [])} second texts; give one or more, as many of each"
            )
        firsts = self.encode_batch(texts, special)
        others = [None] * len(texts) if seconds is None else self.encode_batch(seconds, special)
        rows = [self.frame(a, b, max_length) for a, b in zip(firsts, others, strict=True)]
        longest = max(len(ids) for ids, _ in rows)
        if longest == 0:
            raise ValueError("all texts are empty: there is no token to give to a model")
        ids = [row + [self.pad] * (longest - len(row)) for row, _ in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row, _ in rows]
        batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        if self.TOKEN_TYPES:
            batch["token_type_ids"] = torch.tensor([t + [0] * (longest - len(t)) for _, t in rows])
        return batch

    def __repr__(self) -> str:
        kind, special = type(self).__name__, {name: getattr(self, name) for name in self.SPECIAL}
        named = ", ".join(f"{name}={value}" for name, value in special.items())
        return f"{kind}(vocab_size={self.vocab_size}, {named}, fingerprint={self.fingerprint!r})"

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(
                f"the tokenizer has no {token!r} token, which {type(self).__name__} needs; "
                "add it before saving the tokenizer"
            )
        return int(found)


def framing(kind: type[TextTokenizer], tokenizer: Tokenizer) -> processors.TemplateProcessing:
    """The family's FRAME as a post-processor, so that transformers adds the same tokens as `frame`."""
    before, between, after = ([kind.SPECIAL[name] for name in names] for names in kind.FRAME)
    second = int(kind.TOKEN_TYPES)
    rest = ["$B", *after]
    names = [*before, *between, *after]
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*(f"{piece}:0" for piece in (*before, "$A", *between)), *(f"{p}:{second}" for p in rest)],
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in dict.fromkeys(names)],
    )


def shorten(texts: list[list[int]], room: int) -> list[list[int]]:
    """Cut the ends of one or two token lists so that together they fit into `room`: the longer one first,
    and where both are longer than half, the longer one keeps the odd token.

    Raises ValueError when there is no room for one token of each.
    """
    if room < len(texts):
        raise ValueError(
            f"there is room for {room} tokens of text and {len(texts)} text(s) to fit; allow longer rows"
        )
    if len(texts) == 1:
        return [texts[0][:room]]
    first, second = texts
    half = room // 2 if len(first) <= len(second) else (room + 1) // 2
    keep_first = min(len(first), max(room - len(second), half))
    return [first[:keep_first], second[: room - keep_first]]
