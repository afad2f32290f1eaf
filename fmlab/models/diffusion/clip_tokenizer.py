"""CLIP's tokenizer, for the prompts of text-to-image models: lower-cased byte-level BPE with word ends.

Radford et al. 2021, arXiv:2103.00020, section 2.4. Text is lower-cased and cut into runs of letters, single
digits and runs of other signs; the last piece of each word carries "</w>". A prompt is one row of fixed
length: start, tokens, end, padding. Stable Diffusion 1 pads with the end token, Stable Diffusion 2 with "!".

Shapes: b prompts, l positions of the text encoder.
"""

import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

START, END = "<|startoftext|>", "<|endoftext|>"
WORD_END = "</w>"
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class CLIPTokenizer:
    """Prompts to rows of ids.

    Attributes: bos, eos, pad (ids), max_length (l), vocab_size.
    """

    def __init__(
        self,
        vocabulary: dict[str, int],
        merges: Sequence[tuple[str, str]],
        pad: str = END,
        max_length: int = 77,
    ) -> None:
        """From the contents of vocab.json and merges.txt. Raises ValueError for a missing special token."""
        for token in (START, END, pad):
            if token not in vocabulary:
                raise ValueError(f"the vocabulary has no {token!r}; this is not a CLIP tokenizer")
        if max_length < 3:
            raise ValueError(f"max_length must be at least 3 (start, one token, end), got {max_length}")
        self.vocabulary, self.merges, self.pad_token = dict(vocabulary), list(merges), pad
        self.bos, self.eos, self.pad = vocabulary[START], vocabulary[END], vocabulary[pad]
        self.max_length, self.vocab_size = max_length, len(vocabulary)
        self._tokenizer = _pipeline(
            models.BPE(vocab=self.vocabulary, merges=self.merges, end_of_word_suffix=WORD_END, unk_token=END)
        )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, max_length: int = 77) -> "CLIPTokenizer":
        """Learn merges from `texts`. Ids as in CLIP: bytes, bytes that end words, merges, start and end."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        first = [*alphabet, *(sign + WORD_END for sign in alphabet)]
        if vocab_size < len(first) + 2:
            raise ValueError(f"vocab_size must be at least {len(first) + 2}, got {vocab_size}")
        tokenizer = _pipeline(models.BPE(end_of_word_suffix=WORD_END, unk_token=END))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=alphabet,
            end_of_word_suffix=WORD_END,
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
        merges = merges[: vocab_size - len(first) - 2]
        pieces = [*first, *dict.fromkeys(a + b for a, b in merges), START, END]
        return cls({piece: i for i, piece in enumerate(pieces)}, merges, max_length=max_length)

    # ---- prompts -------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of a text of any length, without start and end."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, lower-cased, words apart; start, end and padding are left out."""
        special = {self.bos, self.eos}
        text: str = self._tokenizer.decode([int(i) for i in ids if int(i) not in special])
        return text.replace(WORD_END, " ").strip()

    def batch(self, prompts: Sequence[str], too_long: str = "refuse") -> Tensor:
        """Rows of ids, int64 [b,l]: start, tokens, end, padding.

        too_long: what becomes of a prompt of more than l - 2 tokens. "refuse": ValueError that names what
            does not fit. "cut": it is left out, with a warning that names it, as diffusers does.
        """
        if too_long not in ("refuse", "cut"):
            raise ValueError(f"too_long must be 'refuse' or 'cut', got {too_long!r}")
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of texts; put a single one in brackets")
        rows = torch.full((len(prompts), self.max_length), self.pad)
        room = self.max_length - 2
        for row, prompt in zip(rows, prompts, strict=True):
            ids = self.encode(prompt)
            if len(ids) > room:
                message = (
                    f"a prompt has {len(ids)} tokens and the text encoder room for {room}; "
                    f"this does not fit: {self.decode(ids[room:])!r}"
                )
                if too_long == "refuse":
                    raise ValueError(f"{message}; shorten it, or leave that out with too_long='cut'")
                warnings.warn(f"{message}; it is left out", stacklevel=2)
                ids = ids[:room]
            row[: len(ids) + 2] = torch.tensor([self.bos, *ids, self.eos])
        return rows

    # ---- files ---------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: str | Path) -> "CLIPTokenizer":
        """From a folder with vocab.json and merges.txt, or tokenizer.json, and tokenizer_config.json.

        Raises ValueError that says what is missing.
        """
        folder = Path(folder)
        config = (
            _read_json(folder / "tokenizer_config.json")
            if (folder / "tokenizer_config.json").is_file()
            else {}
        )
        special = folder / "special_tokens_map.json"
        config = (_read_json(special) if special.is_file() else {}) | config
        pad = config.get("pad_token", END)
        pad = pad["content"] if isinstance(pad, dict) else pad
        max_length = int(config.get("model_max_length", 77))
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            lines = (folder / "merges.txt").read_text("utf-8").splitlines()
            pairs = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
            return cls(_read_json(folder / "vocab.json"), pairs, pad, max_length)  # type: ignore[arg-type]
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} holds neither vocab.json with merges.txt nor tokenizer.json")
        model = _read_json(folder / "tokenizer.json")["model"]
        pairs = [tuple(m.split()) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        return cls(model["vocab"], pairs, pad, max_length)  # type: ignore[arg-type]

    def save(self, folder: str | Path) -> None:
        """Write vocab.json, merges.txt and tokenizer_config.json, which transformers' CLIPTokenizer reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "vocab.json", self.vocabulary)
        lines = ["#version: 0.2", *(f"{a} {b}" for a, b in self.merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        config = dict(
            tokenizer_class="CLIPTokenizer",
            model_max_length=self.max_length,
            bos_token=START,
            eos_token=END,
            unk_token=END,
            pad_token=self.pad_token,
        )
        _write_json(folder / "tokenizer_config.json", config)


def _pipeline(model: models.BPE) -> Tokenizer:
    """What happens around the merges: spaces and case made one, words cut apart, bytes as letters."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if model.token_to_id(END) is not None:  # so written in a prompt, they are the special tokens
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (START, END)])
    return tokenizer


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
