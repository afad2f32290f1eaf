"""Few lengths for a device that compiles a program for each: buckets, their cost, and the programs they make.

A static-shape compiler makes one program for each (rows, length) of a batch. Padding to one length wastes
work, padding to none compiles all the time; a few buckets are the middle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch

Last = Literal["keep", "drop", "pad"]


@dataclass(frozen=True)
class LengthBuckets:
    """The lengths that batches are padded to, rising. Raises ValueError for none, or another order."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in zip((0, *self.lengths), self.lengths, strict=False))
        if not self.lengths or not rising:
            raise ValueError(f"buckets must be lengths from 1 in rising order, got {list(self.lengths)}")

    def bucket(self, length: int) -> int:
        """The shortest bucket that holds `length` tokens. Raises ValueError if none does."""
        for bucket in self.lengths:
            if length <= bucket:
                return bucket
        raise ValueError(f"{length} tokens are longer than the longest bucket, {self.lengths[-1]}")

    def pad(self, batch: Batch, pad_token: int = 0) -> Batch:
        """The batch with every [b, l] tensor padded on the right to the bucket of l.

        Labels get -100 there and attention_mask 0, so that the loss over the same targets is unchanged. A
        mask comes in where something was padded; a causal model does not need it, and it costs one more
        input: take it out for such a model.
        """
        rows, length = batch["input_ids"].shape
        missing = self.bucket(length) - length
        if not missing:
            return dict(batch)
        fills = {"input_ids": pad_token, "labels": IGNORE}
        padded = dict(batch)
        padded.setdefault("attention_mask", torch.ones(rows, length, dtype=torch.int64))
        return {
            name: _pad(tensor, missing, fills.get(name, 0)) if tensor.shape[:2] == (rows, length) else tensor
            for name, tensor in padded.items()
        }

    def waste(self, lengths: Sequence[int]) -> float:
        """The share of padding among all positions, when rows of these lengths are padded one by one."""
        held = sum(self.bucket(length) for length in lengths)
        return 1 - sum(lengths) / held if held else 0.0


def choose_buckets(lengths: Sequence[int], count: int) -> LengthBuckets:
    """At most `count` buckets with the least padding for rows of these lengths.

    The best ends are lengths that occur, and a best choice for the longest rows holds a best choice for the
    others: dynamic programming over the distinct lengths. Raises ValueError for no rows or no bucket.
    """
    if not lengths or count < 1:
        raise ValueError(f"choose_buckets needs rows and at least 1 bucket, got {len(lengths)} and {count}")
    ends = sorted(set(lengths))
    rows = [0]  # rows[i]: how many are no longer than ends[i - 1]
    for end in ends:
        rows.append(sum(length <= end for length in lengths))
    # best[i]: (positions, buckets) that hold all rows up to ends[i - 1]
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())] + [
        (rows[i + 1] * e, (e,)) for i, e in enumerate(ends)
    ]
    for _ in range(count - 1):
        best = [best[0]] + [
            min((best[j][0] + (rows[i + 1] - rows[j]) * end, (*best[j][1], end)) for j in range(i + 1))
            for i, end in enumerate(ends)
        ]
    return LengthBuckets(best[-1][1])


def signatures(
    lengths: Sequence[int], batch_size: int, buckets: LengthBuckets | None = None, last: Last = "keep"
) -> set[tuple[int, int]]:
    """The (rows, length) of all batches of rows in this order: as many programs will be compiled.

    A batch is as long as its longest row, or that row's bucket. last: what becomes of a partial last batch;
    "pad" fills it up with rows without targets. Raises ValueError for a batch_size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    found = set()
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        if len(batch) < batch_size and last == "drop":
            continue
        longest = max(batch)
        rows = batch_size if last == "pad" else len(batch)
        found.add((rows, buckets.bucket(longest) if buckets is not None else longest))
    return found


def _pad(tensor: Tensor, missing: int, fill: int) -> Tensor:
    shape = (tensor.shape[0], missing, *tensor.shape[2:])
    return torch.cat([tensor, tensor.new_full(shape, fill)], dim=1)
