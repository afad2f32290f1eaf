"""What autograd keeps between forward and backward, seen through its saved-tensor hooks."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class SavedActivations:
    """Bytes of the storages that autograd holds: now, and the most at any moment.

    Several saved tensors that share a storage count once, at the size of the storage. Parameters, and views
    of them (a transposed weight), are not activations and do not count.
    """

    live: int = 0
    peak: int = 0
    by_dtype: Counter[str] = field(default_factory=Counter)  # bytes ever saved, by element type
    _holders: Counter[int] = field(default_factory=Counter, repr=False)  # storage address -> saved tensors

    def _save(self, tensor: Tensor) -> "_Saved":
        storage = tensor.untyped_storage()
        if self._holders[storage.data_ptr()] == 0:
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            self.by_dtype[str(tensor.dtype).removeprefix("torch.")] += storage.nbytes()
        self._holders[storage.data_ptr()] += 1
        return _Saved(self, tensor)

    def _drop(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if self._holders[address] == 0:
            self.live -= size


class _Saved:
    """Holds one saved tensor for autograd, and tells the record when autograd lets go of it."""

    def __init__(self, record: SavedActivations, tensor: Tensor) -> None:
        # Detached: an operation that saves its own result would hold itself through the graph, for ever.
        self.record, self.tensor = record, tensor.detach()

    def __del__(self) -> None:
        storage = self.tensor.untyped_storage()
        self.record._drop(storage.data_ptr(), storage.nbytes())


@contextmanager
def saved_activations(exclude: nn.Module | Iterable[Tensor] = ()) -> Iterator[SavedActivations]:
    """Count what autograd saves for the backward pass of the forward that runs in the block.

    exclude: a module (its parameters and buffers) or tensors that are not activations although they are
    saved. Leaves that require a gradient are excluded in any case.
    """
    if isinstance(exclude, nn.Module):
        exclude = [*exclude.parameters(), *exclude.buffers()]
    excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    record = SavedActivations()

    def pack(tensor: Tensor) -> _Saved | Tensor:
        root = tensor if tensor._base is None else tensor._base
        parameter = root.is_leaf and root.requires_grad
        if (
            parameter
            or tensor.untyped_storage().data_ptr() in excluded
            or tensor.untyped_storage().nbytes() == 0
        ):
            return tensor
        return record._save(tensor)

    def unpack(saved: _Saved | Tensor) -> Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield record
