"""Who owns a tensor on a simulated chip: found among all living objects, and only when somebody asks.

Noting it down at every operator would cost each of them; asking the garbage collector costs some tenths of a
second, at an out-of-memory error or a summary.
"""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def raw_of(tensor: Any) -> torch.Tensor | None:
    """The raw tensor under a simulated one, also in a DTensor; another tensor is its own (it may be charged
    to a chip by a mode); None for what is no tensor."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    raw = getattr(tensor, "raw", tensor)
    return raw if isinstance(raw, torch.Tensor) else None


def _living(kind: type) -> list[Any]:
    # by type(): isinstance would ask lazy modules and proxies for their __class__, and so load them
    return [obj for obj in gc.get_objects() if issubclass(type(obj), kind)]


def roots() -> list[nn.Module]:
    """The living modules that are part of no other."""
    modules = _living(nn.Module)
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in inner]


def names() -> Iterator[tuple[torch.Tensor, str]]:
    """(raw tensor, name) of parameters, their gradients, and buffers."""
    for root in roots():
        for name, parameter in root.named_parameters():
            if (raw := raw_of(parameter)) is not None:
                yield raw, repr(name)
            if (raw := raw_of(parameter.grad)) is not None:
                yield raw, f"gradient of {name!r}"
        for name, buffer in root.named_buffers():
            if (raw := raw_of(buffer)) is not None:
                yield raw, f"buffer {name!r}"


def lines() -> Iterator[tuple[torch.Tensor, str]]:
    """(raw tensor, line of the ledger) of parameters, gradients and optimizer states."""
    for optimizer in _living(Optimizer):
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if (raw := raw_of(value)) is not None:
                    yield raw, "optimizer states"
    for root in roots():
        for parameter in root.parameters():
            if (raw := raw_of(parameter.grad)) is not None:
                yield raw, "gradients"
            if (raw := raw_of(parameter)) is not None:
                yield raw, "parameters"
