"""Moving tensors between devices so that what was one tensor stays one.

`module.to` changes a parameter in place only where the new device can take over the old tensor's identity.
Elsewhere (torch_xla, devices registered as PrivateUse1, meta) it makes a new parameter for each place that
holds one, and a weight that two layers share becomes two.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Move = Callable[[Any], Any]


class Moved(dict[int, tuple[Any, Any]]):
    """What has been moved already: id -> (the original, the moved). It keeps the original alive: an id is
    unique only among living objects."""


def move(obj: Any, to: Move, moved: Moved) -> Any:
    """`obj` with each tensor and module in it moved by `to`; other values as they are."""
    if isinstance(obj, nn.Module):
        return move_module(obj, to)
    if isinstance(obj, Tensor):
        if id(obj) not in moved:
            moved[id(obj)] = (obj, to(obj))
        return moved[id(obj)][1]
    return _rebuilt(obj, lambda value: move(value, to, moved))


def host_copy(obj: Any) -> Any:
    """`obj` with a copy of each tensor in host memory. Raises ValueError for a module."""

    def copy(value: Any) -> Any:
        if isinstance(value, nn.Module):
            raise ValueError("a module would leave its device; give its state_dict() instead")
        if not isinstance(value, Tensor):
            return _rebuilt(value, copy)
        # A state_dict detaches, so that tied weights come as two tensors over one memory.
        key = (id(value),) if value.device.type == "meta" else _place(value)
        if key not in copies:
            copies[key] = (value, value.detach().to("cpu", copy=True))
        return copies[key][1]

    copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
    return copy(obj)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors share when they are the same numbers in the same memory."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a device that has no storage to show (torch_xla)
        address = 0
    if address == 0:
        return (id(tensor),)
    return (str(tensor.device), address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _rebuilt(obj: Any, change: Move) -> Any:
    if isinstance(obj, Mapping):
        return type(obj)((key, change(value)) for key, value in obj.items())  # type: ignore[call-arg]
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):  # a named tuple takes its values one by one
        return type(obj)(*(change(value) for value in obj))
    if isinstance(obj, list | tuple):
        return type(obj)(change(value) for value in obj)
    return obj


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
