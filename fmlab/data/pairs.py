"""Pairs of text for BERT's second task: does the second follow the first?

Next-sentence prediction (Devlin et al. 2019, section 3.1) puts a stretch of another document in second place
half of the time; sentence-order prediction (Lan et al. 2020, section 3.1) swaps the two, which can only be
told from how the text hangs together, not from its topic.

Shapes: b rows of this rank, l = seq_len.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal

import numpy as np

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.corpora import Corpus
from fmlab.data.masking import Masking
from fmlab.data.order import Window, WindowSampler
from fmlab.data.rows import padded, stack
from fmlab.data.tokenizer import TextTokenizer

_BORDER = re.compile(r"\n\s*\n|(?<=[.!?])\s+(?=[A-Z\"'(\[])")


def split_sentences(text: str) -> list[str]:
    """Sentences of a text: cut at empty lines, and after . ! ? before a capital, a quote or a bracket."""
    return [part.strip() for part in _BORDER.split(text) if part.strip()]


@dataclass(frozen=True)
class Sentences:
    """A corpus as token ids of sentences, by document."""

    documents: list[list[list[int]]]
    fingerprint: str

    def __len__(self) -> int:
        return sum(map(len, self.documents))

    def __repr__(self) -> str:
        return f"Sentences({len(self.documents):,} documents, {len(self):,} sentences)"


def encode_sentences(corpus: Corpus, tokenizer: TextTokenizer) -> Sentences:
    """Encode each sentence of each document; special tokens written in the text are plain characters."""
    documents = [split_sentences(text) for text in corpus.documents]
    ids = iter(tokenizer.encode_batch([s for document in documents for s in document], special=False))
    encoded = [[found for _ in document if (found := next(ids))] for document in documents]
    return Sentences([d for d in encoded if d], f"{corpus.fingerprint}-{tokenizer.fingerprint}")


class SentencePairSampler(WindowSampler):
    """Training batches of this rank: rows [CLS] a [SEP] b [SEP], padded on the right, each [b, l] --
    input_ids, token_type_ids (0 for a, 1 for b), attention_mask, labels of masked tokens -- and
    sentence_labels [b]: 0 when b follows a in the text, 1 when it does not.

    A window is as many whole sentences of one document as fill a row, two at least. It is cut between two of
    them, at random; where the labels are 1, b is replaced (task "next") or a and b change places ("order").
    A pair that is too long loses tokens at the front or the back of its longer part, as in BERT's code. One
    thing is simpler than there: the sentences that b would have had wait for the next epoch.

    sentences, tokenizer: from encode_sentences, and what it used
    seq_len:           tokens of a row with [CLS] and [SEP]; at most the model's positions
    batch_size:        rows of the global batch, over all ranks
    task:              "next" or "order"
    rate, whole_words: of masking, see Masking; rate=0 gives no "labels"
    versions:          None: new pairs and masks in every epoch; n: n different ones in turn (BERT: 10)
    """

    def __init__(
        self,
        sentences: Sentences,
        tokenizer: TextTokenizer,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        task: Literal["next", "order"] = "next",
        rate: float = 0.15,
        whole_words: bool = False,
        versions: int | None = None,
    ) -> None:
        """Raises ValueError for an unknown task, rows without room, or a corpus without pairs."""
        if task not in ("next", "order"):
            raise ValueError(f"unknown task {task!r}; legal: 'next', 'order'")
        if not sentences.fingerprint.endswith(tokenizer.fingerprint):
            raise ValueError(f"the sentences were encoded by another tokenizer than this {tokenizer}")
        self._room = seq_len - len(tokenizer.frame([], [])[0])
        if self._room < 2:
            raise ValueError(f"seq_len {seq_len} has no room for two texts between the special tokens")
        self.sentences, self.tokenizer, self.seq_len, self.task = sentences, tokenizer, seq_len, task
        self.masking = Masking(tokenizer, rate, whole_words=whole_words) if rate else None
        self._chunks = _chunks(sentences.documents, self._room)
        if not self._chunks:
            raise ValueError("no document has two sentences to make a pair of; give longer texts or rows")
        if task == "next" and len(sentences.documents) < 2:
            raise ValueError("next-sentence prediction needs a second document to take the wrong ones from")
        windows = len(self._chunks)
        super().__init__(windows, windows, batch_size, seed, rank, world_size, versions)

    def _identity(self) -> dict[str, Any]:
        masking = self.masking
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "task": self.task,
            "rate": masking.rate if masking else 0,
            "whole_words": masking.whole_words if masking else False,
            "versions": self.versions,
            "sentences": self.sentences.fingerprint,
        }

    def _rows(self, windows: Sequence[Window]) -> Batch:
        rows: dict[str, list[Any]] = {"input_ids": [], "token_type_ids": [], "labels": [], "sentence": []}
        for window in windows:
            random = self._random(window)
            first, second, label = self._pair(window, random)
            ids, types = self.tokenizer.frame(first, second)
            shown = np.array(ids)
            labels = np.full(len(ids), IGNORE)
            if self.masking is not None:
                shown, labels = self.masking(shown, random)
            for name, value in zip(rows, (shown, types, labels, label), strict=True):
                rows[name].append(value)
        table = {"input_ids": (rows["input_ids"], self.tokenizer.pad)}
        if self.tokenizer.TOKEN_TYPES:
            table["token_type_ids"] = (rows["token_type_ids"], 0)
        if self.masking is not None:
            table["labels"] = (rows["labels"], IGNORE)
        batch = stack(self.seq_len, table)
        batch["attention_mask"] = padded([[1] * len(row) for row in rows["input_ids"]], 0, self.seq_len)
        return batch | {"sentence_labels": padded([rows["sentence"]], IGNORE, len(windows))[0]}

    def _pair(self, window: Window, random: np.random.Generator) -> tuple[list[int], list[int], int]:
        if window.number < 0:
            return [], [], IGNORE
        document, start, stop = self._chunks[window.number]
        cut = start + 1 + int(random.integers(stop - start - 1))
        texts = self.sentences.documents[document]
        first, second = list(chain(*texts[start:cut])), list(chain(*texts[cut:stop]))
        label = int(random.integers(2))
        if label and self.task == "order":
            first, second = second, first
        elif label:
            second = self._elsewhere(document, self._room - len(first), random)
        return *_fit(first, second, self._room, random), label

    def _elsewhere(self, document: int, length: int, random: np.random.Generator) -> list[int]:
        """Sentences of another document, from a random one on, until `length` is reached."""
        other = int(random.integers(len(self.sentences.documents) - 1))
        texts = self.sentences.documents[other + (other >= document)]
        found: list[int] = []
        for sentence in texts[int(random.integers(len(texts))) :]:
            found += sentence
            if len(found) >= length:
                break
        return found


def _chunks(documents: list[list[list[int]]], room: int) -> list[tuple[int, int, int]]:
    """(document, first sentence, last + 1) of runs of sentences that just reach `room` tokens, and of what is
    left at the end of a document; runs of one sentence make no pair and are left out.
    """
    chunks = []
    for number, sentences in enumerate(documents):
        ends = list(accumulate(map(len, sentences)))
        start = 0
        for i, end in enumerate(ends):
            if end - (ends[start - 1] if start else 0) >= room or i == len(ends) - 1:
                if i > start:
                    chunks.append((number, start, i + 1))
                start = i + 1
    return chunks


def _fit(
    first: list[int], second: list[int], room: int, random: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Drop tokens of the longer part, each from the front or the back, until the pair fits into `room`."""
    bounds = [[0, len(first)], [0, len(second)]]
    while sum(stop - start for start, stop in bounds) > room:
        longer = bounds[0] if bounds[0][1] - bounds[0][0] > bounds[1][1] - bounds[1][0] else bounds[1]
        if random.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return first[slice(*bounds[0])], second[slice(*bounds[1])]
