"""A cache of keys and values in pages, shared by many texts (Kwon et al. 2023, arXiv:2309.06180, section 4).

A static cache reserves the longest text for every row. Here all texts draw pages of a few tokens from one
pool as they grow, give them back when they end, and waste less than a page each.

Shapes: b texts, l new tokens, s keys, h heads, k head width.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmlab.models.attention.cache import KVCache


class OutOfPages(RuntimeError):
    """The pool has no free page; some text must give its pages back first."""


class PagePool:
    """Pages for the keys and values of all layers: `pages` pages of `page_size` tokens.

    Raises ValueError for sizes below 1.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        for name, value in (("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.pages, self.page_size = pages, page_size
        # Zeros, not empty: what a mask hides is multiplied by 0, and 0 times a stray NaN is NaN.
        self.key, self.value = (
            torch.zeros(layers, pages * page_size, heads, head_size, dtype=dtype, device=device)
            for _ in range(2)
        )
        self._free = list(reversed(range(pages)))

    @classmethod
    def for_model(cls, model: Any, pages: int, page_size: int = 16) -> "PagePool":
        """A pool with the layers, heads and widths of a model that has `new_cache`."""
        one = model.new_cache(batch=1, max_length=1)
        if type(one) is not KVCache:
            raise ValueError(
                f"{type(model).__name__} keeps a {type(one).__name__}, not keys and values of all tokens: "
                "pages are no use to it"
            )
        layers, _, heads, _, head_size = one.key.shape
        return cls(layers, pages, page_size, heads, head_size, one.key.dtype, one.key.device)

    @property
    def free(self) -> int:
        """Free pages."""
        return len(self._free)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of the keys and values of one page, over all layers."""
        return (self.key.nbytes + self.value.nbytes) // self.pages

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens of one text take."""
        return -(-tokens // self.page_size)

    def grow(self, table: "PageTable", length: int) -> None:
        """Give `table` pages for `length` tokens. Raises OutOfPages, leaving everything as it was."""
        wanted = self.pages_for(length) - len(table.pages)
        if wanted > self.free:
            raise OutOfPages(f"{wanted} pages are needed and {self.free} of {self.pages} are free")
        table.pages += [self._free.pop() for _ in range(wanted)]

    def release(self, table: "PageTable") -> None:
        """Take all pages of a text back."""
        self._free += reversed(table.pages)
        table.pages, table.length = [], 0


@dataclass
class PageTable:
    """One text in the pool: its pages, in order, and how many tokens stand in them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0

    def slots(self, start: int, stop: int, page_size: int) -> list[int]:
        """Places in the pool of the tokens start..stop-1."""
        return [self.pages[t // page_size] * page_size + t % page_size for t in range(start, stop)]


class PagedKVCache:
    """What a model sees of the pool during one call: the cache of these texts, one a row.

    The texts may differ in length. New tokens are given as for any cache, [b,l], shorter rows padded on the
    left; keys and values come back [b,h,s,k] with all rows ending in the last column.

    The rows are collected from their pages by a copy. Production kernels read the pages where they are.
    """

    window: int | None = None
    padded = True
    text_length: int | None = None  # the texts grow while the pool has pages

    def __init__(self, pool: PagePool, tables: list[PageTable]):
        self.pool, self.tables = pool, tables
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}
        self.source: dict[str, Tensor] = {}

    @property
    def batch(self) -> int:
        return len(self.tables)

    @property
    def length(self) -> int:
        """Tokens of the longest text so far."""
        return max((table.length for table in self.tables), default=0)

    @property
    def max_length(self) -> int:
        """Tokens that one text could have at most, with the whole pool for itself."""
        return self.pool.pages * self.pool.page_size

    def begin(self, new: int, attention_mask: Tensor | None) -> Tensor:
        """Find pages for the new tokens of each row; the number of tokens before them, [b].

        Raises OutOfPages; the rows that got pages before keep them, unused.
        """
        device = self.pool.key.device
        counts = [new] * self.batch if attention_mask is None else attention_mask.sum(1).tolist()
        before = [table.length for table in self.tables]
        self.totals = [int(old + more) for old, more in zip(before, counts, strict=True)]
        for table, total in zip(self.tables, self.totals, strict=True):
            self.pool.grow(table, total)
        columns = self.columns = max(max(self.totals), new)
        read, write = [], []
        for table, old, total in zip(self.tables, before, self.totals, strict=True):
            slots = table.slots(0, total, self.pool.page_size)
            read.append([0] * (columns - total) + slots)
            write += slots[old:]
        self._read = torch.tensor(read, device=device)
        self._write = torch.tensor(write, dtype=torch.long, device=device)
        ends = torch.arange(columns, device=device)
        self._real = ends[None] >= columns - torch.tensor(self.totals, device=device)[:, None]
        self._new = ends[None, :new] >= new - torch.tensor(counts, device=device)[:, None]
        return torch.tensor(before, device=device)

    def keys(self, new: int) -> int:
        """How many key columns the queries of this call meet; after `begin`."""
        return self.columns

    def real_keys(self, new: int) -> Tensor:
        """Which of those hold a token, bool [b,s]."""
        return self._real

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values [b,h,l,k] in the pages; all of that layer's, [b,h,s,k]."""
        found = []
        for pool, new in ((self.pool.key[layer], key), (self.pool.value[layer], value)):
            pool[self._write] = new.transpose(1, 2)[self._new].to(pool.dtype)
            found.append(pool[self._read].transpose(1, 2))
        return found[0], found[1]

    def finish(self, new: int) -> None:
        """Count the new tokens in."""
        for table, total in zip(self.tables, self.totals, strict=True):
            table.length = total
