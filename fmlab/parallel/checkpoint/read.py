"""From a checkpoint, of either format and of any layout, into any engine."""

import errno
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fmlab import storage
from fmlab._ranks.errors import name_ranks
from fmlab.parallel import state
from fmlab.parallel.checkpoint import named
from fmlab.parallel.checkpoint.optimizers import check_optimizer
from fmlab.parallel.checkpoint.pieces import Piece, local, whole_box
from fmlab.parallel.checkpoint.planner import LoadPlanner, Planned
from fmlab.parallel.checkpoint.write import METADATA, _gather, _in_group

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


def open_checkpoint(directory: str | Path, together: bool = True) -> Source:
    """The checkpoint in a folder, its files checked. together: every rank calls it, and checks some.

    Raises StorageError that names a file which is missing, cut short or changed, on every rank; and the ranks
    that cannot see the folder.
    """
    folder = Path(directory)
    sharded = (folder / METADATA).exists() or any(folder.glob("__*.distcp"))
    seen = _gather(sharded) if together else [sharded]
    if any(seen) and not all(seen):
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        raise storage.StorageError(
            errno.ENOENT,
            f"{name_ranks(blind)} cannot see {folder / METADATA}, which other ranks see; all "
            "hosts need a file system that they share",
        )
    return Sharded(folder, together) if sharded else Plain(folder)


# region sharded
class Sharded:
    """Shards in torch.distributed.checkpoint's files. Its table is a pickle: load only what you trust."""

    def __init__(self, folder: Path, together: bool) -> None:
        self.folder, self.together = folder, together and _in_group()
        self._verify()
        table = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        kinds = {
            name: (found.size, found.properties.dtype)
            for name, found in table.items()
            if isinstance(found, TensorStorageMetadata)
        }
        self.weights: dict[str, Kind] = {name: kind for name, kind in kinds.items() if "/" not in name}
        self.optimizer: dict[str, Kind] = {name: kind for name, kind in kinds.items() if "/" in name}

    def _verify(self) -> None:
        """Each rank checks some of the files, and all learn of a bad one."""
        ranks, rank = (
            (torch.distributed.get_world_size(), torch.distributed.get_rank()) if self.together else (1, 0)
        )
        found = self._damage(rank, ranks)
        for damage in _gather(found) if self.together else [found]:
            if damage:
                raise storage.StorageError(errno.EIO, f"{damage}; use another checkpoint")

    def _damage(self, rank: int, ranks: int) -> str:
        """What is wrong with this rank's share of the files; "" if nothing is."""
        manifest = self.folder / storage.MANIFEST
        try:
            files = json.loads(manifest.read_text())["files"]
            listed = sorted({*files, METADATA})[rank::ranks]
            bad = [name for name in listed if not _intact(self.folder / name, files[name])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{manifest} is missing or damaged: {error!r}"
        return f"{self.folder / bad[0]} is missing, cut short or changed" if bad else ""

    def fill(self, pieces: Mapping[str, Piece]) -> None:
        planned: dict[str, Any] = {key: Planned(piece) for key, piece in pieces.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.load(
                planned,
                storage_reader=dcp.FileSystemReader(self.folder),
                planner=LoadPlanner(),
                no_dist=True,  # every rank reads what it needs; they have nothing to tell each other
            )


# endregion


class Plain:
    """Whole tensors in safetensors files, as an engine that divides nothing writes them."""

    def __init__(self, folder: Path) -> None:
        self._tensors = storage.load_tensors(folder, name="model")
        self._state = storage.load_tensors(folder, name="optimizer")
        self.weights: dict[str, Kind] = {name: (t.shape, t.dtype) for name, t in self._tensors.items()}
        self.optimizer: dict[str, Kind] = {name: (t.shape, t.dtype) for name, t in self._state.items()}

    def fill(self, pieces: Mapping[str, Piece]) -> None:
        for key, piece in pieces.items():
            whole = self._tensors[key] if key in self._tensors else self._state[key]
            for box in piece.boxes:
                box.of(piece.tensor).copy_(box.of_whole(whole))


def _intact(path: Path, entry: Mapping[str, Any]) -> bool:
    try:
        return path.stat().st_size == entry["bytes"] and storage.sha256(path) == entry["sha256"]
    except OSError:
        return False


# region load
def load(engine: "Engine", directory: str | Path) -> None:
    """Take up a checkpoint of any layout; every rank calls it. Nothing changes unless all of it fits.

    Raises ValueError that names the parameters that are missing, unknown or of another shape.
    """
    ledger, source = engine.ledger, open_checkpoint(directory)
    check_optimizer(directory, source.optimizer, engine.optimizer)
    expected = {name: torch.Size(entry.shape) for name, entry in ledger.entries.items()}
    expected |= {name: buffer.shape for name, buffer in state.buffers(engine.model).items()}
    _check_fit(directory, source, expected)
    weights = named.weights(engine)
    moments: dict[str, Piece] = {}
    restored: dict[nn.Parameter, dict[str, Tensor]] = {}
    for key, (shape, dtype) in source.optimizer.items():
        name, _, field = key.rpartition("/")
        parameter = dict(ledger.parameters()).get(name)
        if parameter is None:
            continue  # of another pipeline stage
        if named.is_divided(field, tuple(shape), ledger.entries[name].shape):
            value = torch.zeros_like(parameter.detach(), dtype=dtype)
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


def load_model(model: nn.Module, directory: str | Path) -> nn.Module:
    """Fill a whole model, in one process, from a checkpoint of any engine and layout; returns it.

    `load_model(GPT(config), folder).save_pretrained(out)` exports to Hugging Face's format. Raises ValueError
    that names what does not fit.
    """
    source = open_checkpoint(directory, together=False)
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
