"""Rows for masked language models: a stretch of text in BERT's or RoBERTa's frame, some tokens hidden.

RoBERTa draws new masks whenever a row comes round ("dynamic"), BERT kept those of its prepared data (Liu et
al. 2019, section 4.1): that is `versions`, None or a number.

Shapes: b rows of this rank, l = seq_len.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.encoded import Tokens
from fmlab.data.masking import Masking
from fmlab.data.order import Window, WindowSampler
from fmlab.data.rows import check_encoded, stack
from fmlab.data.sampler import check_windows
from fmlab.data.tokenizer import TextTokenizer


class MaskedSampler(WindowSampler):
    """Training batches of this rank: input_ids and labels, each [b, l].

    A row is [CLS] text [SEP] with seq_len - 2 tokens of the corpus, which run on over the ends of documents
    (RoBERTa's FULL-SENTENCES); each is a target with probability `rate`, and labels are -100 elsewhere.
    Rows of `evaluation` that are short come with an attention_mask.

    tokens, tokenizer: the corpus, and what it was encoded with
    seq_len:           tokens of a row, with [CLS] and [SEP]
    batch_size:        rows of the global batch, over all ranks
    versions:          None: new masks in every epoch; n: n different ones in turn (BERT: 10; 1 is static)
    rate, whole_words: see Masking
    packed:            rows come with document_ids, so that no document of a row sees another one
    """

    def __init__(
        self,
        tokens: Tokens,
        tokenizer: TextTokenizer,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        rate: float = 0.15,
        whole_words: bool = False,
        versions: int | None = None,
        packed: bool = False,
    ) -> None:
        """Raises ValueError for settings that cannot go together; see Masking and WindowSampler."""
        check_encoded(tokens, tokenizer)
        self.masking = Masking(tokenizer, rate, whole_words=whole_words)
        self.tokens, self.tokenizer, self.seq_len = tokens, tokenizer, seq_len
        self.packed = packed
        self._room = seq_len - len(tokenizer.frame([])[0])
        if self._room < 1:
            raise ValueError(f"seq_len {seq_len} has no room for text between the special tokens")
        moved = versions is None  # a window that moves is not the same window
        windows = len(tokens) // self._room - (1 if moved else 0)
        check_windows(windows, len(tokens), seq_len, len(tokens) // (2 if moved else 1) + 2)
        everything = -(-len(tokens) // self._room)
        offsets = self._room if moved else 1
        super().__init__(windows, everything, batch_size, seed, rank, world_size, versions, offsets)

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "rate": self.masking.rate,
            "whole_words": self.masking.whole_words,
            "versions": self.versions,
            "packed": self.packed,
            "tokens": self.tokens.fingerprint,
        }

    def _rows(self, windows: Sequence[Window]) -> Batch:
        inputs, labels, documents = [], [], []
        for window in windows:
            start = window.number * self._room + window.offset if window.number >= 0 else len(self.tokens)
            text = self.tokens.ids[start : start + self._room]
            ids = np.array(self.tokenizer.frame(text.tolist())[0])
            shown, targets = self.masking(ids, self._random(window))
            inputs.append(shown)
            labels.append(targets)
            documents.append(self._documents(start, len(text)))
        rows = {"input_ids": (inputs, self.tokenizer.pad), "labels": (labels, IGNORE)}
        if self.packed:
            rows["document_ids"] = (documents, self.tokens.num_documents)  # padding is a document of its own
        return stack(self.seq_len, rows, "input_ids")

    def _documents(self, start: int, length: int) -> NDArray[np.int64]:
        """The document of each token of a framed row: [CLS] is with the first token, [SEP] with the last."""
        numbers = self.tokens.document_of(np.arange(start, start + length))
        places = np.arange(-1, length + 1).clip(0, max(length - 1, 0))
        return numbers[places] if length else np.zeros(2, np.int64)
