"""From a checkpoint, of either format and of any layout, into any engine."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmlab import storage
from fmlab._ranks.errors import name_ranks
from fmlab.parallel import state
from fmlab.parallel.checkpoint import named
from fmlab.parallel.checkpoint.blocks import Stored, fill, stored
from fmlab.parallel.checkpoint.optimizers import check_optimizer
from fmlab.parallel.checkpoint.pieces import Piece, local, whole_box

if TYPE_CHECKING:
    from fmlab.parallel.engine import Engine

Kind = tuple[torch.Size, torch.dtype]


class Source(Protocol):
    """A checkpoint on disk."""

    @property
    def weights(self) -> Mapping[str, Kind]:
        """Shape and element type of each parameter and buffer."""

    @property
    def optimizer(self) -> Mapping[str, Kind]:
        """The same of the optimizer's state, by "parameter/key"."""

    def fill(self, pieces: Mapping[str, Piece]) -> None:
        """Read into the pieces."""


def open_checkpoint(directory: str | Path, ranks: Any = None) -> Source:
    """The checkpoint in a folder, its files checked.

    ranks: a process group whose ranks all call it, and each check some files; None: this process checks all.

    Raises StorageError that names a file which is missing, cut short or changed, on every rank; and the ranks
    that cannot see the folder.
    """
    folder = Path(directory)
    seen = state.gather((folder / storage.MANIFEST).exists(), ranks)
    if any(seen) and not all(seen):
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        raise storage.StorageError(
            errno.ENOENT,
            f"{name_ranks(blind)} cannot see {folder / storage.MANIFEST}, which other ranks see; all "
            "hosts need a file system that they share",
        )
    if (folder / ".metadata").exists() and not any(seen):
        raise storage.StorageError(
            errno.EIO,
            f"{folder} is a checkpoint of torch.distributed.checkpoint, whose table is a pickle, which could "
            "run any code: it is not loaded",
        )
    place, number = (0, 1) if ranks is None else (dist.get_rank(ranks), dist.get_world_size(ranks))
    found = state.gather(storage.damage(folder, place, number), ranks)
    if bad := [one for one in found if one]:
        raise storage.StorageError(errno.EIO, bad[0])
    try:
        files = storage.read_manifest(folder)
        sharded = stored(files)
        return Sharded(folder, sharded) if sharded else Plain(folder, set(files))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise storage.StorageError(errno.EIO, f"{folder / storage.MANIFEST} is damaged: {error}") from error


class Sharded:
    """Blocks of tensors, as engines that divide them write them."""

    def __init__(self, folder: Path, tensors: dict[str, Stored]) -> None:
        self._folder, self._stored = folder, tensors
        kinds = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        self.weights: dict[str, Kind] = {name: kind for name, kind in kinds.items() if "/" not in name}
        self.optimizer: dict[str, Kind] = {name: kind for name, kind in kinds.items() if "/" in name}

    def fill(self, pieces: Mapping[str, Piece]) -> None:
        fill(self._folder, self._stored, pieces)


class Plain:
    """Whole tensors, as an engine that divides nothing writes them."""

    def __init__(self, folder: Path, files: set[str]) -> None:
        self._tensors = storage.load_tensors(folder, name="model", check=False)
        if "frozen.safetensors" in files:
            self._tensors |= storage.load_tensors(folder, name="frozen", check=False)
        self._state = storage.load_tensors(folder, name="optimizer", check=False)
        self.weights: dict[str, Kind] = {name: (t.shape, t.dtype) for name, t in self._tensors.items()}
        self.optimizer: dict[str, Kind] = {name: (t.shape, t.dtype) for name, t in self._state.items()}

    def fill(self, pieces: Mapping[str, Piece]) -> None:
        for key, piece in pieces.items():
            whole = self._tensors[key] if key in self._tensors else self._state[key]
            for box in piece.boxes:
                box.of(piece.tensor).copy_(box.of_whole(whole))


# region load
def load(engine: "Engine", directory: str | Path) -> None:
    """Take up a checkpoint of any layout; every rank calls it. Nothing changes unless all of it fits.

    Raises ValueError that names the parameters that are missing, unknown or of another shape.
    """
    ledger, source = engine.ledger, open_checkpoint(directory, engine.ranks)
    check_optimizer(directory, source.optimizer, engine.optimizer)
    expected = {name: torch.Size(entry.shape) for name, entry in ledger.entries.items()}
    expected |= {name: buffer.shape for name, buffer in state.buffers(engine.model).items()}
    _check_fit(directory, source, expected)
    weights, parameters = named.weights(engine), dict(ledger.parameters())
    moments: dict[str, Piece] = {}
    restored: dict[nn.Parameter, dict[str, Tensor]] = {}
    for key, (shape, dtype) in source.optimizer.items():
        name, _, field = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            continue  # of another pipeline stage
        if named.is_divided(field, tuple(shape), ledger.entries[name].shape):
            value = _room(engine.optimizer.state.get(parameter, {}).get(field), parameter, dtype)
            moments[key] = Piece(local(value), tuple(shape), weights[name].boxes)
        else:
            value = torch.zeros(
                shape, dtype=dtype
            )  # a step count stays where optimizers have it, on the host
            moments[key] = Piece(value, tuple(shape), whole_box(tuple(shape)))
        restored.setdefault(parameter, {})[field] = value
    with torch.no_grad():
        source.fill(weights | moments)
    engine.optimizer.state.clear()
    for parameter, fields in restored.items():
        engine.optimizer.state[parameter] = fields
    engine._loaded()


# endregion


def _room(kept: Any, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Where state like a parameter is read into: what the optimizer keeps already, if it is alike."""
    if isinstance(kept, Tensor) and (kept.shape, kept.dtype) == (parameter.shape, dtype):
        return kept.detach()
    return torch.zeros_like(parameter.detach(), dtype=dtype)


def load_model(model: nn.Module, directory: str | Path) -> nn.Module:
    """Fill a whole model, in one process, from a checkpoint of any engine and layout; returns it.

    `load_model(GPT(config), folder).save_pretrained(out)` exports to Hugging Face's format. Raises ValueError
    that names what does not fit.
    """
    source = open_checkpoint(directory)
    tensors = {name: p.detach() for name, p in model.named_parameters()} | state.buffers(model)
    _check_fit(directory, source, {name: tensor.shape for name, tensor in tensors.items()})
    with torch.no_grad():
        source.fill({n: Piece(t, tuple(t.shape), whole_box(tuple(t.shape))) for n, t in tensors.items()})
    return model


def _check_fit(directory: str | Path, source: Source, expected: Mapping[str, torch.Size]) -> None:
    state.check("weights", {name: shape for name, (shape, _) in source.weights.items()}, expected)
    strangers = sorted({key.rpartition("/")[0] for key in source.optimizer} - set(expected))
    if strangers:
        raise ValueError(f"{directory} has optimizer state of unknown parameters: {state.some(strangers)}")
