"""What a rank holds of parameters, gradients and optimizer state: by formula, and counted.

    stage   parameters   gradients   optimizer     bytes for each of the model's parameters
    0       p            g           K
    1       p            g           K / ranks
    2       p            g / ranks   K / ranks
    3       p / ranks    g / ranks   K / ranks

(Rajbhandari et al. 2019, arXiv:1910.02054, sections 3.1 and 5, figure 1.) Activations, buffers, and vectors
that are on their way are not in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from fmlab.parallel.engine import Engine
from fmlab.parallel.zero.divided import DividedStates

#: K, the bytes of an optimizer for each parameter. "mixed": parameters are bf16 or fp16, and the optimizer
#: has an fp32 master of each (the paper's K is that of Adam); "fp32": they are fp32 and need none.
K = {"adam mixed": 12, "adam fp32": 8, "momentum mixed": 8, "momentum fp32": 4, "sgd mixed": 4, "sgd fp32": 0}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


# region formula
def state_bytes(
    parameters: int,
    ranks: int,
    stage: int,
    *,
    k: float = K["adam mixed"],
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
) -> StateBytes:
    """Bytes of a rank in a stage of ZeRO (0 is plain data parallelism).

    parameters: of the model, a tied one once. ranks: among which states are divided (data / replicas).
    k: bytes of the optimizer for each parameter, see `K`.
    gradient_bytes: 2, with the other defaults, makes the paper's 16 bytes a parameter; 4, where gradients
    add up
        in fp32, the 18 that are also quoted. All in fp32 (k=8, 4, 4) is 16 again.

    Raises ValueError for a stage that does not exist.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}: legal are 0, 1, 2, 3")
    shares = [ranks if stage >= least else 1 for least in (3, 2, 1)]
    each = (parameter_bytes, gradient_bytes, k)
    return StateBytes(*(size * parameters / share for size, share in zip(each, shares, strict=True)))


# endregion


@dataclass(frozen=True)
class HeldBytes:
    """What a rank holds on its device, and what lies in the host's memory because the layout says so."""

    device: StateBytes
    host: StateBytes


def held_bytes(engine: Engine) -> HeldBytes:
    """Count what this rank holds after a step: every storage once, in the first line that it belongs to."""
    states = getattr(engine, "states", None)
    divided = states if isinstance(states, DividedStates) else None
    lines: list[list[Tensor]] = [[], [], []]
    lines[0] = [p.detach() for p in engine.model.parameters() if not p.is_meta]
    if divided is not None:
        lines[0] += divided.weights_held()
        lines[1] += divided.gradients_held()
    pieces = [piece for _, piece in engine.ledger.parameters()]
    lines[1] += [p.grad for p in (*pieces, *engine.model.parameters()) if p.grad is not None]
    lines[2] = [piece.detach() for piece in pieces]  # masters, unless they are the parameters themselves
    lines[2] += [
        value for state in engine.optimizer.state.values() for value in state.values() if _counts(value)
    ]
    seen: set[int] = set()
    sizes = [_new_bytes(tensors, seen) for tensors in lines]
    if divided is None or not divided.on_host:
        return HeldBytes(StateBytes(*sizes), StateBytes(0, 0, 0))
    return HeldBytes(StateBytes(sizes[0], 0, 0), StateBytes(0, *sizes[1:]))


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0  # step counts are 4 bytes for a whole parameter


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
