"""An engine's state as plain named tensors on disk, without a trace of wrappers, ranks or layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fmlab import storage

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


def save(engine: "Engine", directory: str | Path) -> None:
    """See Engine.save."""
    model = {**engine.full_params(), **buffers(engine.model)}
    optimizer = engine.full_optimizer_state()

    def write() -> None:
        with storage.atomic_directory(directory) as folder:
            storage.save_tensors(folder, model, name="model")
            storage.save_tensors(folder, optimizer, name="optimizer")

    engine._run_on_writer(write)


def load(engine: "Engine", directory: str | Path) -> None:
    """See Engine.load. Every rank reads the files; nothing changes unless all names and shapes fit."""
    ledger, parameters = engine.ledger, dict(engine.ledger.parameters())
    own_buffers = buffers(engine.model)
    expected = {name: torch.Size(entry.shape) for name, entry in ledger.entries.items()}
    expected |= {name: buffer.shape for name, buffer in own_buffers.items()}
    weights = storage.load_tensors(directory, name="model")
    _check("weights", {name: t.shape for name, t in weights.items()}, expected)
    moments = storage.load_tensors(directory, name="optimizer")
    owners = {key: key.rpartition("/")[0] for key in moments}
    strangers = sorted(set(owners.values()) - set(ledger.entries))
    if strangers:
        raise ValueError(f"{directory} has optimizer state of unknown parameters: {_some(strangers)}")

    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(ledger.piece(name, weights[name]))
        for name, buffer in own_buffers.items():
            buffer.copy_(weights[name])
    engine.optimizer.state.clear()
    for key, tensor in moments.items():
        name, _, field = key.rpartition("/")
        if name in parameters:
            whole = tensor.shape == ledger.entries[name].shape and tensor.dim()
            mine = ledger.piece(name, tensor) if whole else tensor
            engine.optimizer.state[parameters[name]][field] = _restore(mine, parameters[name])
    engine._loaded()


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds: persistent ones, as in `state_dict`."""
    kept = set(model.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _restore(tensor: Tensor, parameter: nn.Parameter) -> Any:
    # Moments live beside their parameter; a step count stays where the optimizer had it, on the host.
    return tensor.to(parameter.device) if tensor.shape == parameter.shape and tensor.dim() else tensor.clone()


def _check(what: str, found: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected))
    shapes = [
        f"{name} is {tuple(found[name])}, the model has {tuple(expected[name])}"
        for name in sorted(set(found) & set(expected))
        if found[name] != expected[name]
    ]
    problems = [
        f"{label}: {_some(names)}"
        for label, names in (("missing", missing), ("unknown", unknown), ("other shape", shapes))
        if names
    ]
    if problems:
        raise ValueError(f"the saved {what} do not fit this model; " + "; ".join(problems))


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
