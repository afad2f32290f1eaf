"""What a rank writes of a checkpoint, taken at one moment.

Taking it needs every rank: who holds the same number agrees on who writes it, and some engines gather.
Writing needs no other rank, so that it may go on beside the next steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmlab import storage
from fmlab.parallel import state
from fmlab.parallel.checkpoint import named
from fmlab.parallel.checkpoint.pieces import Piece

if TYPE_CHECKING:
    from fmlab.parallel.engine import Engine

Place = dict[str, Any]  # of a block in the whole: {"tensor", "shape", "offsets"}


@dataclass
class Snapshot:
    """This rank's part of a checkpoint.

    files:    name of a file -> its tensors
    places:   name of a file -> for each of its tensors that is a block of a larger one, where it lies
    constant: files whose tensors are not trained
    """

    files: dict[str, dict[str, Tensor]]
    places: dict[str, dict[str, Place]] = field(default_factory=dict)
    constant: frozenset[str] = frozenset()

    def write(self, folder: Path, before: Path | None = None) -> dict[str, dict[str, Any]]:
        """Write the files into a folder that is there; their entries for its manifest.

        before: the folder of an earlier checkpoint, to which constant files may be linked. Raises
        StorageError.
        """
        entries = {}
        for name, tensors in self.files.items():
            entry = storage.write_tensors(folder / name, tensors, before, name in self.constant)
            entries[name] = {**entry, "blocks": self.places.get(name, {})}
        return entries


# region take
def take(engine: "Engine", copy: bool = False) -> Snapshot:
    """What this rank writes of weights, buffers and optimizer state now; every rank calls it.

    copy: the tensors are copies, so that steps may go on: memory for all that this rank writes. Otherwise
    they are the engine's own wherever those are on the host.
    """
    taken = _blocks(engine) if engine.ledger.divided else _whole(engine)
    if copy:
        taken.files = {name: _copies(tensors) for name, tensors in taken.files.items()}
    return taken


# endregion


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host; names that share a tensor share its copy."""
    made: dict[tuple[Any, ...], Tensor] = {}
    found = {}
    for key, tensor in tensors.items():
        same = (tensor.data_ptr() or id(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if same not in made:
            made[same] = tensor.detach().to("cpu", copy=True)
        found[key] = made[same]
    return found


def _whole(engine: "Engine") -> Snapshot:
    """The files of an engine whose ranks hold whole tensors: the first one writes."""
    weights, moments = engine.full_params(), engine.full_optimizer_state()
    if not engine.is_writer:
        return Snapshot({})
    trained = engine.ledger.trainable()
    files = {
        "model.safetensors": {n: t for n, t in weights.items() if n in trained} | state.buffers(engine.model),
        "optimizer.safetensors": moments,
        "frozen.safetensors": {n: t for n, t in weights.items() if n not in trained},
    }
    if not files["frozen.safetensors"]:
        del files["frozen.safetensors"]
    return Snapshot(files, constant=frozenset({"frozen.safetensors"}))


def _blocks(engine: "Engine") -> Snapshot:
    """The files of one rank of an engine that divides tensors."""
    rank, everyone = dist.get_rank(), partial(state.gather, group=engine.ranks)
    weights = named.weights(engine)
    pieces = named.choose_writers(weights | named.optimizer_state(engine, weights), everyone, rank)
    trained = engine.ledger.trainable()
    part, frozen = f"part-{rank:04d}.safetensors", f"frozen-{rank:04d}.safetensors"
    taken = Snapshot({part: {}, frozen: {}}, {part: {}, frozen: {}}, frozenset({frozen}))
    parameters = {name for name, _ in engine.ledger.parameters()}
    for key, piece in pieces.items():
        name = frozen if key in parameters and key not in trained else part
        if piece.writes:
            _enter(taken, name, key, piece)
    if not taken.files[frozen]:
        del taken.files[frozen]
    return taken


def _enter(taken: Snapshot, name: str, key: str, piece: Piece) -> None:
    for box in piece.boxes:
        block = f"{key}@{','.join(map(str, box.offsets))}"
        taken.files[name][block] = box.of(piece.tensor).detach().to("cpu").contiguous()
        taken.places[name][block] = {
            "tensor": key,
            "shape": list(piece.shape),
            "offsets": list(box.offsets),
            "sizes": list(box.sizes),
            "dtype": str(piece.tensor.dtype).removeprefix("torch."),
        }


def dtype_called(name: str) -> torch.dtype:
    """The element type of that name. Raises ValueError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no element type")
    return found
