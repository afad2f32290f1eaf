"""Counted bytes: what the programs of interpreted kernels load and store, for each tensor.

    with count_bytes() as count:
        matmul(a, b)
    count.loaded, count.stored            bytes, of all launches
    count.launches[0].loaded["a"]         of the kernel's argument a_ptr

A byte counts each time that a program asks for it, and not where a mask hides it. That is what would cross
the memory bus if no cache lay between; a GPU's L2 may answer some of it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from fmlab.kernels.triton.launch import Kernel


@dataclass(frozen=True)
class Pointer:
    """What a compiler knows of a tensor: the dtype, and whether it begins at a multiple of 16 bytes."""

    dtype: torch.dtype
    aligned: bool


@dataclass
class Launch:
    """One launch of a kernel: its programs, its arguments (tensors as pointers), and the bytes of each."""

    kernel: "Kernel"
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    loaded: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)

    @property
    def programs(self) -> int:
        return int(np.prod(self.grid))

    def __repr__(self) -> str:
        return (
            f"{self.kernel.__name__}, {self.programs:,} programs: "
            f"{self.loaded.total():,} B loaded, {self.stored.total():,} B stored"
        )


@dataclass
class Count:
    """The launches inside a `count_bytes()`, in order."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def loaded(self) -> int:
        """Bytes that all programs of all launches loaded."""
        return sum(launch.loaded.total() for launch in self.launches)

    @property
    def stored(self) -> int:
        """Bytes that all programs of all launches stored."""
        return sum(launch.stored.total() for launch in self.launches)

    @property
    def total(self) -> int:
        return self.loaded + self.stored


@contextmanager
def count_bytes() -> Iterator[Count]:
    """Count what kernels on CPU tensors load and store; launches on a GPU raise ValueError meanwhile."""
    from fmlab.kernels.triton import interpreter

    watch = _Watch(Count())
    interpreter.observers.append(watch)
    try:
        yield watch.count
    finally:
        interpreter.observers.remove(watch)


class _Watch:
    """Finds the tensor of each address, and adds up."""

    def __init__(self, count: Count) -> None:
        self.count = count
        self.ranges: list[tuple[str, int, int]] = []

    def start(self, kernel: "Kernel", grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        self.ranges, shown = [], {}
        for name, one in arguments.items():
            shown[name] = one
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self.ranges.append((name.removesuffix("_ptr"), storage.data_ptr(), storage.nbytes()))
                shown[name] = Pointer(one.dtype, one.data_ptr() % 16 == 0)
        self.count.launches.append(Launch(kernel, grid, shown))

    def load(self, addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
        self._add(self.count.launches[-1].loaded, addresses, mask, itemsize)

    def store(self, addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
        self._add(self.count.launches[-1].stored, addresses, mask, itemsize)

    def _add(self, to: Counter[str], addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
        asked = addresses[np.broadcast_to(mask, addresses.shape)]
        if asked.size:
            first = int(asked.flat[0])
            inside = (name for name, start, size in self.ranges if start <= first < start + size)
            to[next(inside, "elsewhere")] += asked.size * itemsize
