"""An engine's state as plain named tensors on disk, without a trace of wrappers, ranks or layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from fmlab.parallel.engine import Engine

_SHOWN = 5


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state of `optimizer` as "parameter/key" -> tensor; plain numbers become tensors."""
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}/{key}"] = torch.as_tensor(value).detach()
    return tensors


def gather(item: Any, group: Any) -> list[Any]:
    """The `item` of every rank of a process group, by rank; every rank calls it. group: None for one
    alone."""
    if group is None:
        return [item]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, item, group=group)
    return every


def save(engine: "Engine", directory: str | Path) -> None:
    """See Engine.save."""
    from fmlab.parallel import checkpoint  # which reads and writes what is named here

    checkpoint.save(engine, directory)


def load(engine: "Engine", directory: str | Path) -> None:
    """See Engine.load."""
    from fmlab.parallel import checkpoint

    checkpoint.load(engine, directory)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds: persistent ones, as in `state_dict`."""
    kept = set(model.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def check(what: str, found: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Raise ValueError that names what is missing, unknown or of another shape."""
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected))
    shapes = [
        f"{name} is {tuple(found[name])}, the model has {tuple(expected[name])}"
        for name in sorted(set(found) & set(expected))
        if found[name] != expected[name]
    ]
    problems = [
        f"{label}: {some(names)}"
        for label, names in (("missing", missing), ("unknown", unknown), ("other shape", shapes))
        if names
    ]
    if problems:
        raise ValueError(f"the saved {what} do not fit this model; " + "; ".join(problems))


def some(names: list[str]) -> str:
    """The first few names."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
