"""Rows for a prefix language model: the beginning is seen in both directions, the rest is predicted (Raffel
et al. 2020, section 3.2.1).

Shapes: b rows of this rank, l = seq_len.
"""

from collections.abc import Sequence

import torch

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.encoded import Tokens
from fmlab.data.order import Window
from fmlab.data.sampler import TokenSampler


class PrefixSampler(TokenSampler):
    """Training batches of this rank: input_ids [b, l], labels [b, l], prefix_lengths [b].

    A prefix has 1 to l - 1 tokens, each length equally likely. Labels are the next tokens; those that are
    themselves in the prefix, where the model can see them, are -100. The last token of the prefix predicts
    the first after it.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raises ValueError when a row has no room for a prefix and a target, or as for TokenSampler."""
        if seq_len < 2:
            raise ValueError(f"a prefix and a target need seq_len of at least 2, got {seq_len}")
        super().__init__(tokens, seq_len, batch_size, seed, rank, world_size)

    def _rows(self, windows: Sequence[Window]) -> Batch:
        batch = super()._rows(windows)
        lengths_b = torch.tensor([int(self._random(window).integers(1, self.seq_len)) for window in windows])
        positions_l = torch.arange(self.seq_len)
        batch["labels"] = batch["labels"].masked_fill(positions_l < lengths_b[:, None] - 1, IGNORE)
        batch["prefix_lengths"] = lengths_b
        return batch
