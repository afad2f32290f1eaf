"""The rows of a parameter in equal chunks: who holds what.

Chunks are as large as they must be for all rows to have a place, so the last ranks may hold fewer rows, or
none: 5 rows on 4 ranks are 2, 2, 1, 0. PyTorch's FSDP2 divides the same way (torch.chunk along dim 0).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def chunk_rows(rows: int, ranks: int) -> int:
    """Rows of a full chunk."""
    return -(-rows // ranks)


@dataclass(frozen=True)
class Chunks:
    """Divides dim 0; a parameter without dims counts as one row."""

    def shard(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """A copy of the rows of `rank`, [rows of this rank, ...]."""
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        size = chunk_rows(len(rows), world_size)
        return rows[rank * size : (rank + 1) * size].clone()

    def unshard(self, shards: list[Tensor], shape: torch.Size) -> Tensor:
        """All rows, one below the other."""
        return torch.cat(shards).view(shape)
