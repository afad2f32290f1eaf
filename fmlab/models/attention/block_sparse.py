"""Block-sparse patterns: which blocks of keys each block of queries may look at.

A pattern is a square of booleans over blocks of the sequence, so patterns join with `|`. Sparse Transformer
(Child et al. 2019, arXiv:1904.10509) joins local and strided blocks, BigBird (Zaheer et al. 2020,
arXiv:2007.14062) local, global and random ones.

Shapes: n blocks, q queries, s keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockPattern:
    """Tokens of query block i see tokens of key block j where layout[i, j].

    Args:
        layout: bool [n,n], kept on the CPU: tile kernels ask it which tiles to skip.
        size: tokens in a block; position p is in block p // size.
    """

    layout: Tensor
    size: int

    def __post_init__(self) -> None:
        shape = list(self.layout.shape)
        if len(shape) != 2 or shape[0] != shape[1] or self.layout.dtype != torch.bool:
            raise ValueError(
                f"layout must be a square of booleans over blocks, got {self.layout.dtype} {shape}"
            )
        if self.size < 1:
            raise ValueError(f"size must be at least 1 token, got {self.size}")
        object.__setattr__(self, "layout", self.layout.cpu())

    @property
    def length(self) -> int:
        """Tokens that the pattern covers."""
        return len(self.layout) * self.size

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Bool [q,s] for positions [q] and [s]."""
        layout = self.layout.to(query.device)
        return layout[query // self.size][:, key // self.size]

    def touches(self, rows: slice, columns: slice) -> bool:
        """Whether any pair of these ranges of positions is allowed."""
        first, last = (rows.start // self.size, columns.start // self.size), (rows.stop, columns.stop)
        stop = tuple(-(-end // self.size) for end in last)
        return bool(self.layout[first[0] : stop[0], first[1] : stop[1]].any())


def local_blocks(n: int, reach: int) -> Tensor:
    """Each block and its `reach` neighbours on either side, bool [n,n]."""
    index = torch.arange(n, device="cpu")
    return (index[:, None] - index).abs() <= reach


def strided_blocks(n: int, stride: int) -> Tensor:
    """The last block of every `stride` blocks is seen by all, bool [n,n]."""
    if not 1 <= stride <= n:
        raise ValueError(f"stride must be in 1..{n}, the number of blocks, got {stride}")
    index = torch.arange(n, device="cpu")
    return ((index % stride == stride - 1) & (index >= 0)[:, None]).clone()


def global_blocks(n: int, count: int) -> Tensor:
    """The first `count` blocks see all blocks and are seen by all, bool [n,n]."""
    index = torch.arange(n, device="cpu")
    return (index < count) | (index < count)[:, None]


def random_blocks(n: int, count: int, seed: int = 0) -> Tensor:
    """Each block sees `count` random blocks, bool [n,n]."""
    if not 0 <= count <= n:
        raise ValueError(f"count must be in 0..{n}, the number of blocks, got {count}")
    order = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), device="cpu").argsort(-1)
    return torch.zeros(n, n, dtype=torch.bool, device="cpu").scatter_(1, order[:, :count], True)
