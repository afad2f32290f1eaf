"""Span corruption: T5 puts a sentinel for each hidden span and writes the spans out (Raffel et al. 2020,
section 3.1.4).

    text     Thank you for inviting me to your party last week
    inputs   Thank you <extra_id_0> me to your party <extra_id_1> week </s>
    labels   <extra_id_0> for inviting <extra_id_1> last </s>

In the published code a row begins with kept text and ends with a hidden span, always. So on short rows the
first token is never hidden and the last one always; with anywhere=True spans fall anywhere.

Shapes: b rows of this rank, l = seq_len, t = target_len, n tokens of text in a row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.encoded import Tokens
from fmlab.data.order import Window, WindowSampler
from fmlab.data.rows import check_encoded, stack
from fmlab.data.sampler import check_windows
from fmlab.data.unigram import Unigram


def span_counts(length: int, rate: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """How many of `length` tokens are hidden, and in how many spans. Rounded as T5 does: half to even."""
    hidden = min(max(round(length * rate), 1), length - 1)
    return hidden, max(round(hidden / mean_span), 1)


def span_lengths(seq_len: int, rate: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """(tokens of text, tokens of the target) so that the inputs, with a sentinel for each span and </s>, fill
    seq_len: 512 gives 568 and 114. T5's code calls this compute_input_and_target_lengths.

    Raises ValueError when rate or mean_span is out of range, or seq_len is too short for a span.
    """
    if not 0 < rate < 1:
        raise ValueError(f"the rate of hidden tokens must be between 0 and 1, got {rate}; T5's is 0.15")
    if mean_span < 1:
        raise ValueError(f"spans have at least 1 token on average, got mean_span={mean_span}; T5's is 3")

    def lengths(text: int) -> tuple[int, int]:
        hidden = round(text * rate)
        spans = round(hidden / mean_span)
        return text - hidden + spans + 1, hidden + spans + 1

    text = seq_len
    while lengths(text + 1)[0] <= seq_len:
        text += 1
    inputs, target = lengths(text)
    if rate == 0.5 and target > inputs:  # as T5 does: a target that is as long as the input, not longer
        text, target = text - 1, target - 1
    if text < 2 or round(round(text * rate) / mean_span) < 1:
        shortest = next(n for n in range(2, 10**6) if round(round(n * rate) / mean_span) >= 1)
        raise ValueError(
            f"seq_len {seq_len} is too short for a span of mean length {mean_span} at a rate of {rate}; "
            f"legal: from {lengths(shortest)[0]}"
        )
    return text, target


def span_mask(
    length: int,
    random: np.random.Generator,
    rate: float = 0.15,
    mean_span: float = 3.0,
    anywhere: bool = False,
) -> NDArray[np.bool_]:
    """[length]: True where hidden. Kept and hidden spans take turns, with lengths drawn from all ways to cut
    the numbers of kept and of hidden tokens into that many pieces, all equally likely.

    anywhere: also the first and the last kept span may be empty, so that a row can begin with a hidden span
    and end with kept text. Otherwise, as published, it begins with kept text and ends with a hidden span.
    Raises ValueError for fewer than 2 tokens: there is nothing to keep and to hide.
    """
    if length < 2:
        raise ValueError(f"a span needs at least 2 tokens of text, got {length}")
    hidden, spans = span_counts(length, rate, mean_span)
    spans = min(spans, length - hidden + int(anywhere))  # there is a kept token between two spans
    if anywhere:
        kept = _segments(length - hidden + 2, spans + 1, random)
        kept[[0, -1]] -= 1
        borders = np.zeros(2 * spans + 1, dtype=np.int64)
        borders[::2], borders[1::2] = kept, _segments(hidden, spans, random)
    else:
        kept = _segments(length - hidden, spans, random)
        borders = np.stack([kept, _segments(hidden, spans, random)], axis=1).ravel()
    return np.repeat(np.arange(len(borders)) % 2 == 1, borders)


def _segments(items: int, segments: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Lengths, each at least 1, of `segments` pieces of `items`."""
    cuts = np.sort(random.choice(items - 1, segments - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [items]]))


def corrupt(
    ids: NDArray[np.int64], mask: NDArray[np.bool_], sentinels: Sequence[int], eos: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The inputs and the target for ids [n] of which mask [n] are hidden. See the top of this file.

    Raises ValueError when there are more spans than sentinels.
    """
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    if len(starts) > len(sentinels):
        raise ValueError(
            f"{len(starts)} spans and {len(sentinels)} sentinels; shorten the row, lengthen the spans, or "
            f"train Unigram with sentinels={len(starts)}"
        )
    used = np.asarray(sentinels[: len(starts)], dtype=np.int64)
    shown = ids.copy()
    shown[starts] = used
    first = np.zeros(len(ids), dtype=bool)
    first[starts] = True
    inputs = np.append(shown[~mask | first], eos)
    places = np.flatnonzero(first[mask])  # where a span begins among the hidden tokens
    target = np.append(np.insert(ids[mask], places, used), eos)
    return inputs, target


class SpanSampler(WindowSampler):
    """Training batches of this rank: input_ids [b, l] and labels [b, t], both full to the last token.

    The model makes the decoder's inputs from the labels. Short rows of `evaluation` are padded: input_ids
    with <pad> and an attention_mask, labels with -100.

    tokens, tokenizer: the corpus, and the Unigram it was encoded with
    seq_len:           tokens of the encoder's inputs (T5: 512)
    batch_size:        rows of the global batch, over all ranks
    versions:          None: new spans in every epoch; n: n different ones in turn
    rate, mean_span, anywhere: see span_mask

    text_len, target_len: n and t, from span_lengths
    """

    def __init__(
        self,
        tokens: Tokens,
        tokenizer: Unigram,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        rate: float = 0.15,
        mean_span: float = 3.0,
        anywhere: bool = False,
        versions: int | None = None,
    ) -> None:
        """Raises ValueError for settings that cannot go together, too few sentinels or too little text."""
        check_encoded(tokens, tokenizer)
        self.text_len, self.target_len = span_lengths(seq_len, rate, mean_span)
        self.tokens, self.tokenizer, self.seq_len = tokens, tokenizer, seq_len
        self.rate, self.mean_span, self.anywhere = rate, mean_span, anywhere
        spans = span_counts(self.text_len, rate, mean_span)[1]
        if spans > len(tokenizer.sentinels):
            raise ValueError(
                f"rows of {seq_len} tokens have {spans} hidden spans and the tokenizer has only "
                f"{len(tokenizer.sentinels)} sentinels; train Unigram with sentinels={spans}"
            )
        moved = versions is None
        windows = len(tokens) // self.text_len - (1 if moved else 0)
        check_windows(windows, len(tokens), seq_len, round((1 - rate) * len(tokens) / (2 if moved else 1)))
        whole, rest = divmod(len(tokens), self.text_len)
        everything = whole + (rest >= 2)  # one token alone is no text to hide something in
        offsets = self.text_len if moved else 1
        super().__init__(windows, everything, batch_size, seed, rank, world_size, versions, offsets)

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "rate": self.rate,
            "mean_span": self.mean_span,
            "anywhere": self.anywhere,
            "versions": self.versions,
            "tokens": self.tokens.fingerprint,
        }

    def _rows(self, windows: Sequence[Window]) -> Batch:
        inputs, labels = [], []
        for window in windows:
            if window.number < 0:
                inputs.append(np.array([self.tokenizer.eos]))
                labels.append(np.array([], dtype=np.int64))
                continue
            start = window.number * self.text_len + window.offset
            ids = self.tokens.ids[start : start + self.text_len].astype(np.int64)
            hidden = span_mask(len(ids), self._random(window), self.rate, self.mean_span, self.anywhere)
            row, target = corrupt(ids, hidden, self.tokenizer.sentinels, self.tokenizer.eos)
            inputs.append(row)
            labels.append(target)
        batch = stack(self.seq_len, {"input_ids": (inputs, self.tokenizer.pad)}, "input_ids")
        return batch | stack(self.target_len, {"labels": (labels, IGNORE)})
