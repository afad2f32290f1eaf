"""What a backend must do, and the part that is the same on every device.

To add a backend, add a file to this folder with a subclass of `Backend` called BACKEND; the registry
finds it by the file's name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn

Precision = Literal["fp32", "bf16", "fp16"]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Backend(ABC):
    """A kind of device: moving data there, waiting for it, seeding, precision, compiling, memory.

    name:                what `get_backend` calls it
    device:              the torch device of this process
    distributed_backend: the name of the process-group backend that carries its tensors
    precisions:          what `autocast` accepts
    """

    name: ClassVar[str]
    distributed_backend: ClassVar[str]
    precisions: ClassVar[tuple[Precision, ...]] = ("fp32", "bf16")
    device: torch.device

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether this machine has such a device and the software to use it. Never raises."""

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """The legal words after a colon in the name ("sim:trn2"); empty when there are none."""
        return ()

    @classmethod
    @abstractmethod
    def create(cls, variant: str | None, index: int) -> "Backend":
        """The backend for device number `index` of this host."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all work given to it."""

    @abstractmethod
    def device_count(self) -> int:
        """How many such devices this host has."""

    @abstractmethod
    def memory_stats(self) -> dict[str, int]:
        """Bytes: "current", "peak" (both of this process) and "total" (of the device)."""

    def seed(self, seed: int) -> None:
        """Seed torch's generators of this device and of the host."""
        torch.manual_seed(seed)

    def autocast(self, precision: Precision) -> AbstractContextManager[Any]:
        """The context for a forward pass in `precision`; weights stay in fp32.

        Raises ValueError for a precision this backend does not have.
        """
        if precision not in self.precisions:
            legal = ", ".join(self.precisions)
            raise ValueError(f"the {self.name} backend has no precision {precision!r}; legal: {legal}")
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[precision])

    def compile(self, fn: F) -> F:
        """`fn` compiled for this device."""
        compiled: Any = torch.compile(fn)
        return compiled

    def to_device(self, obj: T) -> T:
        """Move a tensor, a module, or a dict, list or tuple of them to this device.

        A module is moved in place and its tied weights are tied again: on devices whose tensors cannot
        replace host storage, `module.to` makes a new parameter for each place that holds it, and the
        copies drift apart in silence.
        """
        moved: Any = obj
        if isinstance(obj, nn.Module):
            moved = move_module(obj, self._move)
        elif isinstance(obj, torch.Tensor):
            moved = self._move(obj)
        elif isinstance(obj, Mapping):
            moved = type(obj)((key, self.to_device(value)) for key, value in obj.items())  # type: ignore[call-arg]
        elif isinstance(obj, list | tuple):
            moved = type(obj)(self.to_device(value) for value in obj)
        return moved

    def _move(self, obj: Any) -> Any:
        return obj.to(self.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r})"


def tie_groups(module: nn.Module) -> list[list[str]]:
    """The names of parameters and buffers that are one tensor, a list for each such tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in _all_tensors(module):
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def move_module(module: nn.Module, move: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Move a module with `move` and tie again whatever was tied before."""
    groups = tie_groups(module)
    moved = move(module)
    for first, *others in groups:
        owner, _, leaf = first.rpartition(".")
        tensor = getattr(moved.get_submodule(owner), leaf)
        for other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(moved.get_submodule(owner), leaf, tensor)
    assert tie_groups(moved) == groups, "the move to the device broke tied weights"
    return moved


def _all_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
