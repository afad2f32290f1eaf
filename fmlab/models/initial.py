"""First weights parameter by parameter: each a function of a seed and its name alone.

`reset_parameters` draws all weights from one stream of random numbers, so that the last depends on all before
it: a rank that holds a part of the model would have to draw the whole. Here the calls of reset_parameters are
recorded on the meta device, where they cost nothing, and carried out for one parameter at a time, from a
stream of its own. Whoever does so, on one device or on a rank of a thousand, gets the same numbers.
"""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a recorded call."""

    number: int


@dataclass(frozen=True)
class _Recorded:
    """One call: operator, arguments with slots for tensors, and the slots of its results."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[int | None]


class InitialValues:
    """`values(name)`: the first value of a parameter, whole, on the CPU; the same whoever asks."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        """model: on the meta device; its reset_parameters is called, or else that of each of its modules.

        Raises ValueError for parameters that nothing fills, or that are filled from one another.
        """
        self.seed = seed
        self._like = dict(model.named_parameters())
        recorder = _Recorder(self._like)
        with torch.random.fork_rng(devices=[]), recorder, torch.no_grad():
            torch.manual_seed(seed)  # for tables that are made first and copied
            _reset(model)
        self._programs = recorder.programs
        unfilled = [name for name, calls in self._programs.items() if not calls]
        if unfilled:
            raise ValueError(
                f"reset_parameters does not fill {', '.join(unfilled)}, so that a model on the meta device "
                "has no first value for it; fill it there, or build the model on a real device"
            )

    def __call__(self, name: str) -> Tensor:
        """[shape of the parameter], drawn from a stream that depends on the seed and the name alone."""
        like = self._like[name]
        value = torch.empty(like.shape, dtype=like.dtype)
        tensors: dict[int, Any] = {_Recorder.PARAMETER: value}
        stream = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()

        def real(item: Any) -> Any:
            return tensors[item.number] if isinstance(item, _Slot) else item

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(stream[:8]) >> 1)
            for call in self._programs[name]:
                arguments, options = tree_map(real, (call.arguments, call.options))
                results, _ = tree_flatten(call.function(*arguments, **options))
                tensors |= {n: t for n, t in zip(call.results, results, strict=True) if n is not None}
        return value


def _reset(model: nn.Module) -> None:
    own: Callable[[], None] | None = getattr(model, "reset_parameters", None)
    for reset in [own] if own else [getattr(m, "reset_parameters", None) for m in model.modules()]:
        if reset is not None:
            reset()


class _Recorder(TorchDispatchMode):
    """Notes each operator that touches a parameter, or what was made from one, under its name."""

    PARAMETER = 0  # the slot of the parameter itself

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.programs: dict[str, list[_Recorded]] = {name: [] for name in parameters}
        self._known = {id(p): (name, self.PARAMETER) for name, p in parameters.items()}
        self._alive: list[Tensor] = []  # so that no other tensor gets the identity of a known one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves, _ = tree_flatten((args, kwargs or {}))
        owners = {self._known[id(leaf)][0] for leaf in leaves if id(leaf) in self._known}
        if len(owners) > 1:
            raise ValueError(f"{' and '.join(sorted(owners))} are filled from one another")
        for name in owners:
            self._note(name, func, args, kwargs or {}, result)
        return result

    def _note(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        def slot(item: Any) -> Any:
            known = self._known.get(id(item)) if isinstance(item, Tensor) else None
            return item if known is None else _Slot(known[1])

        numbers: list[int | None] = []
        arguments, options = tree_map(slot, (args, kwargs))
        for made in tree_flatten(result)[0]:
            if isinstance(made, Tensor) and id(made) not in self._known:
                self._known[id(made)] = (name, len(self._alive) + 1)
                self._alive.append(made)
            numbers.append(self._known[id(made)][1] if isinstance(made, Tensor) else None)
        self.programs[name].append(_Recorded(func, arguments, options, numbers))


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill a model on one device with the values that ranks fill their parts of it with."""
    twins = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    values = InitialValues(copy.deepcopy(model, dict(twins)), seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(values(name))
