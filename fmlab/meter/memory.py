"""Peak bytes of tensors that are alive at once, on any device, by watching storages come and go."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_RESIZE = "fmlab::resize_storage_"  # how parts of this package free and refill a tensor that is still in use


@dataclass
class PeakMemory:
    """Bytes of the storages that were made inside the block: alive now, and the most at any moment.

    What a kernel allocates and frees inside one operator is not seen; memory of tensors that existed before
    the block is not counted, even when they are freed in it.
    """

    live: int = 0
    peak: int = 0

    def _grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _shrink(self, size: int) -> None:
        self.live -= size


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Count tensor bytes that are made in the block; views and aliases share a storage and count once."""
    record = PeakMemory()
    with _Watch(record):
        yield record


class _Watch(TorchDispatchMode):
    def __init__(self, record: PeakMemory) -> None:
        super().__init__()
        self.record = record
        #: Bytes that are counted for each storage.
        self.known: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Storages that exist already are not new when an operator returns them (views, in-place, out=).
        inputs = {id(storage): storage for storage in map(_storage, _tensors((args, kwargs)))}
        resizes = func._schema.name == _RESIZE
        before = {key: storage.nbytes() for key, storage in inputs.items()} if resizes else {}
        result = func(*args, **(kwargs or {}))
        for key, size in before.items():
            self._resized(inputs[key], inputs[key].nbytes() - size)
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if id(storage) not in inputs and storage not in self.known:
                self._count(storage, storage.nbytes())
        return result

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        counted = self.known[storage] = [size]
        self.record._grow(size)
        weakref.finalize(storage, lambda: self.record._shrink(counted[0])).atexit = False

    def _resized(self, storage: torch.UntypedStorage, more: int) -> None:
        """A storage grew or shrank in place; what it had before the block is not counted, as ever."""
        if storage not in self.known:
            self._count(storage, max(more, 0))
            return
        counted = self.known[storage]
        more = max(more, -counted[0])
        counted[0] += more
        self.record._grow(more)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
