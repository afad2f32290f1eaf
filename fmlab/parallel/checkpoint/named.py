"""An engine's state as named pieces: weights, buffers and what the optimizer keeps."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fmlab.parallel import state
from fmlab.parallel.checkpoint.pieces import Box, Piece, boxes, local, whole_box

if TYPE_CHECKING:
    from fmlab.parallel.engine import Engine


def weights(engine: "Engine") -> dict[str, Piece]:
    """This rank's pieces of all parameters, and the buffers, by their names in the undivided model."""
    ledger = engine.ledger
    places = {name: boxes(ledger, name) for name, _ in ledger.parameters()}
    found = {
        name: Piece(local(p.detach()), ledger.entries[name].shape, places[name], ledger.counts(name))
        for name, p in ledger.parameters()
    }
    buffers = state.buffers(engine.model)
    return found | {name: Piece(t, tuple(t.shape), whole_box(t.shape)) for name, t in buffers.items()}


def optimizer_state(engine: "Engine", of_weights: dict[str, Piece]) -> dict[str, Piece]:
    """The optimizer's state by "parameter/key": divided as the parameter is, or a number that is not."""
    tensors = state.optimizer_tensors(engine.optimizer, dict(engine.ledger.parameters()))
    found = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        found[key] = state_piece(field, tensor, of_weights[name])
    return found


def state_piece(field: str, tensor: Tensor, parameter: Piece) -> Piece:
    """A tensor of the optimizer's state beside the parameter that it belongs to."""
    tensor = local(tensor)
    if is_divided(field, tuple(tensor.shape), tuple(parameter.tensor.shape)):
        return Piece(tensor, parameter.shape, parameter.boxes, parameter.writes)
    return Piece(tensor, tuple(tensor.shape), whole_box(tuple(tensor.shape)))


def is_divided(field: str, shape: tuple[int, ...], like: tuple[int, ...]) -> bool:
    """Whether state of this shape is one number for each of a parameter of shape `like`, not one for all."""
    return shape == like and (bool(shape) or field != "step")


def undivided(pieces: dict[str, Piece]) -> set[str]:
    """What several ranks may hold alike, so that they must agree who writes it: numbers and buffers."""
    return {key for key, piece in pieces.items() if piece.writes and _is_whole(piece.boxes, piece.shape)}


def _is_whole(found: list[Box], shape: tuple[int, ...]) -> bool:
    return len(found) == 1 and found[0].sizes == tuple(shape)


def choose_writers(pieces: dict[str, Piece], gather: Any, rank: int) -> dict[str, Piece]:
    """Leave each whole tensor to the first rank that holds it. gather: an item of each rank, by rank."""
    mine = undivided(pieces)
    first: dict[str, int] = {}
    for other, theirs in enumerate(gather(sorted(mine))):
        for key in theirs:
            first.setdefault(key, other)
    return {
        key: Piece(p.tensor, p.shape, p.boxes, p.writes and (key not in mine or first[key] == rank))
        for key, p in pieces.items()
    }
