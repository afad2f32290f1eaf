"""Batches as a function of (seed, step): the same on every run, for every number of ranks, after a resume.

The token array is cut into windows of seq_len + 1 tokens that overlap by one, so that each token of an
epoch is a target once. An epoch is a permutation of the windows drawn from (seed, epoch), with the
cut moved by an offset drawn with it, so that a window does not begin at the same token every time.
Step s takes the windows s * batch_size onwards of the endless row of epochs: an epoch whose windows do
not fill the last batch is continued by the next one, and every batch is full. Rank r of n takes the r-th
n-th of the batch.

Shapes: b sequences of this rank, l = seq_len.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.encoded import Tokens


class TokenSampler:
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
        check_batch_size(batch_size, world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of 0 to {world_size - 1}")
        self.windows_per_epoch = (len(tokens) - 1) // seq_len - 1  # one is given up for the moving cut
        if self.windows_per_epoch < 1:
            raise ValueError(
                f"the corpus has {len(tokens)} tokens, too few for sequences of {seq_len}; "
                f"legal seq_len: 1 to {max(1, (len(tokens) - 1) // 2)}"
            )
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.rank, self.world_size, self.packed = rank, world_size, packed
        self.step = 0
        self._epoch: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of step `step`, in any order of calls."""
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        starts = np.array([self._start(first + i) for i in range(share)])
        return _batch(self.tokens, starts, self.seq_len, self.packed)

    def __iter__(self) -> Iterator[Batch]:
        """Endless batches from the current step on."""
        while True:
            batch = self.batch(self.step)
            self.step += 1
            yield batch

    def epoch_of(self, step: int) -> float:
        """How many epochs have been seen before step `step`."""
        return step * self.batch_size / self.windows_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs: the step, and the settings that it only makes sense with."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved step; the world size may differ. Raises ValueError when the data has changed."""
        changed = [
            f"{key}: {state.get(key)!r} in the checkpoint, {value!r} now"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if changed:
            raise ValueError("cannot resume with other data; " + "; ".join(changed))
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "packed": self.packed,
            "tokens": self.tokens.fingerprint,
        }

    def _start(self, index: int) -> int:
        """Where window number `index` of the endless row of epochs begins in the token array."""
        epoch, place = divmod(index, self.windows_per_epoch)
        if self._epoch[0] != epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            offset = int(random.integers(self.seq_len))
            self._epoch = (epoch, random.permutation(self.windows_per_epoch) * self.seq_len + offset)
        return int(self._epoch[1][place])


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
    check_batch_size(batch_size, world_size)
    windows = -(-(len(tokens) - 1) // seq_len)
    chosen = np.arange(windows)
    if max_batches is not None and windows > max_batches * batch_size:
        chosen = np.linspace(0, windows - 1, max_batches * batch_size).astype(np.int64)
    share = batch_size // world_size
    for first in range(0, len(chosen), batch_size):
        mine = np.arange(first + rank * share, first + (rank + 1) * share)
        starts = np.where(
            mine < len(chosen), chosen[np.minimum(mine, len(chosen) - 1)] * seq_len, len(tokens)
        )
        yield _batch(tokens, starts, seq_len, packed)


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


def check_batch_size(batch_size: int, world_size: int, micro_batches: int = 1) -> None:
    """Raise ValueError unless every rank and micro-batch gets the same, non-zero number of sequences."""
    parts = world_size * micro_batches
    if batch_size < 1 or batch_size % parts:
        near = max(1, round(batch_size / parts)) * parts
        legal = sorted({max(parts, near - parts), near, near + parts})
        raise ValueError(
            f"batch_size {batch_size} is not divisible by {world_size} ranks x {micro_batches} "
            f"micro-batches; legal: multiples of {parts}, such as {', '.join(map(str, legal))}"
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
