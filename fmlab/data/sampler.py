"""Next-token batches as a function of (seed, step): the same on every run, for every number of ranks.

The token array is cut into windows of seq_len + 1 tokens that overlap by one, so that each token of an
epoch is a target once. The order of windows is that of `fmlab.data.order`; the cut is moved by an offset
drawn for each epoch, so that a window does not begin at the same token every time.

Shapes: b sequences of this rank, l = seq_len.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.encoded import Tokens
from fmlab.data.order import Window, WindowSampler, check_batch_size, evaluation_shares

__all__ = ["TokenSampler", "check_batch_size", "divisors", "evaluation_batches", "split_micro_batches"]


class TokenSampler(WindowSampler):
    """Training batches of this rank: {"input_ids" [b, l], "labels" [b, l]} and, packed, "document_ids".

    tokens:     the encoded corpus
    seq_len:    tokens of a sequence
    batch_size: sequences of the global batch, over all ranks
    seed:       of the order; every rank passes the same
    packed:     keep the documents of a sequence apart: attention stays inside a document
                ("document_ids"), and no token is predicted across a border
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        packed: bool = False,
    ) -> None:
        """Raises ValueError when batch_size is not divisible by world_size or the corpus is too short."""
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        windows = (len(tokens) - 1) // seq_len - 1  # one is given up for the moving cut
        everything = -(-(len(tokens) - 1) // seq_len)
        super().__init__(windows, everything, batch_size, seed, rank, world_size, offsets=seq_len)
        check_windows(windows, len(tokens), seq_len, max(1, (len(tokens) - 1) // 2))
        self.tokens, self.seq_len, self.packed = tokens, seq_len, packed

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "packed": self.packed,
            "tokens": self.tokens.fingerprint,
        }

    def _rows(self, windows: Sequence[Window]) -> Batch:
        starts = [w.number * self.seq_len + w.offset if w.number >= 0 else len(self.tokens) for w in windows]
        return _batch(self.tokens, np.array(starts), self.seq_len, self.packed)


def evaluation_batches(
    tokens: Tokens,
    seq_len: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    packed: bool = False,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Every token of the corpus as a target once, over all ranks together.

    Every rank gets the same number of batches of the same shape, so that a model that communicates in
    its forward pass does not hang; sequences that fill up the last batch have no labels (-100).
    With max_batches, that many batches of windows spread evenly over the corpus.
    Raises ValueError when batch_size is not divisible by world_size.
    """
    windows = -(-(len(tokens) - 1) // seq_len)
    for numbers in evaluation_shares(windows, batch_size, rank, world_size, max_batches):
        starts = [number * seq_len if number >= 0 else len(tokens) for number in numbers]
        yield _batch(tokens, np.array(starts), seq_len, packed)


def split_micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Cut a batch into `count` equal parts. Raises ValueError when its size is not divisible."""
    size = len(next(iter(batch.values())))
    if size % count:
        raise ValueError(
            f"{size} sequences do not divide into {count} micro-batches; legal: {divisors(size)}"
        )
    return [
        {name: tensor[i * size // count : (i + 1) * size // count] for name, tensor in batch.items()}
        for i in range(count)
    ]


def check_windows(windows: int, tokens: int, seq_len: int, longest: int) -> None:
    """Raise ValueError when a corpus is too short for a single window."""
    if windows < 1:
        raise ValueError(
            f"the corpus has {tokens} tokens, too few for sequences of {seq_len}; "
            f"legal seq_len: 1 to {longest}"
        )


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    return [i for i in range(1, number + 1) if number % i == 0]


def _batch(tokens: Tokens, starts: NDArray[np.int64], seq_len: int, packed: bool) -> Batch:
    """Windows of seq_len inputs and their next tokens; what lies beyond the corpus has no label."""
    positions = starts[:, None] + np.arange(seq_len + 1)
    inside = positions < len(tokens)
    window = np.where(inside, tokens.ids[np.minimum(positions, len(tokens) - 1)], tokens.end_of_text)
    keep = inside[:, 1:]
    batch = {"input_ids": torch.from_numpy(window[:, :-1].astype(np.int64))}
    if packed:
        documents = tokens.document_of(np.minimum(positions, len(tokens) - 1))
        keep = keep & (documents[:, 1:] == documents[:, :-1])
        batch["document_ids"] = torch.from_numpy(documents[:, :-1] - documents[:, :1])
    batch["labels"] = torch.from_numpy(np.where(keep, window[:, 1:], IGNORE).astype(np.int64))
    return batch
