"""Batches of examples of nearly one length: little padding, and few shapes.

Shapes: b rows of this rank, l tokens of the longest input of the batch, t of its longest output.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.examples import Example, ExampleSampler
from fmlab.data.order import Window

POOL = 16  # batches among which rows change places
MULTIPLE = 8  # lengths are rounded up to it, so that a compiler meets few of them


class ByLengthSampler(ExampleSampler):
    """Like ExampleSampler, each example once an epoch, but rows of a batch are about equally long and padded
    to the longest of them, rounded up to a multiple of 8 (but not beyond the longest of all).

    The rows of sixteen batches, drawn in WindowSampler's order, are sorted by length and cut into sixteen
    again, which then come in random order. Ranks may have batches of different shapes.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        pad: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raises ValueError as ExampleSampler does."""
        super().__init__(sorted(examples, key=_sizes), pad, batch_size, seed, rank, world_size)

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of step `step`, in any order of calls."""
        pool, place = divmod(step, POOL)
        rows = POOL * self.batch_size
        # The examples are in order of their length, so their numbers are.
        windows = sorted((self._window(pool * rows + i) for i in range(rows)), key=lambda w: w.number)
        order = np.random.Generator(np.random.PCG64([self.seed, pool, POOL])).permutation(POOL)
        share = self.batch_size // self.world_size
        first = int(order[place]) * self.batch_size + self.rank * share
        return self._rows(windows[first : first + share])

    def _rows(self, windows: Sequence[Window]) -> Batch:
        batch = super()._rows(windows)
        for name in self.lengths:
            real = batch["attention_mask"] if name == "input_ids" else batch[name] != IGNORE
            longest = int(real.sum(1).max()) if "attention_mask" in batch else self.lengths[name]
            kept = max(1, -(-longest // MULTIPLE) * MULTIPLE)
            batch[name] = batch[name][:, :kept]
        if "attention_mask" in batch:
            batch["attention_mask"] = batch["attention_mask"][:, : batch["input_ids"].shape[1]]
        return batch


def _sizes(example: Example) -> tuple[Any, ...]:
    """The lengths of an example's lists, the longest first."""
    return tuple(sorted((len(v) for v in example.values() if not isinstance(v, int)), reverse=True))
