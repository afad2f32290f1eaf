"""The update of a step on a lazy device, where the host may not look at a number before it decides.

Elsewhere a step reads the gradient's norm and leaves the weights alone if it is not finite. On a device that
only notes operations down, that read would cut the step into two programs and let the device wait. Here the
update is always noted down, and each result is chosen on the device: the new value where the norm is finite,
the old one where it is not.

A learning rate of 0 would leave numbers out of the program and so make another one, to be compiled for that
step alone. The optimizer keeps the rate before it, and the weights are chosen to stay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Undo:
    """What a skipped update must give back on the host: step counts, which it holds and reads at once."""

    def __init__(self) -> None:
        self._host: list[tuple[dict[str, Any], str, Any]] = []

    def remember(self, state: dict[str, Any], key: str, value: Any) -> None:
        """Note what `state[key]` is to become again."""
        self._host.append((state, key, value))

    def undo(self) -> None:
        """Put the host's values back; the device has kept its own."""
        for state, key, value in self._host:
            state[key] = value


@contextmanager
@torch.no_grad()
def kept_unless(finite: Tensor, moving: bool, optimizer: Optimizer) -> Iterator[Undo]:
    """Whatever the optimizer changes in the block keeps its value where `finite` [] (bool) is False; the
    weights do so too unless they are `moving`.

    On the host that takes a call of `undo` afterwards. State that is made in the block becomes 0.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    weights = [parameter.clone() for parameter in parameters]
    before = {
        (parameter, key): value.clone() if isinstance(value, Tensor) else value
        for parameter in parameters
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    undo = Undo()
    yield undo
    # region keep
    new = finite & torch.tensor(moving).to(finite.device)  # data, not a constant of the program
    for parameter, old in zip(parameters, weights, strict=True):
        parameter.copy_(torch.where(new, parameter, old))
        # endregion
        state = optimizer.state[parameter]
        for key, value in state.items():
            previous = before.get((parameter, key))
            if previous is None:
                previous = torch.zeros_like(value) if isinstance(value, Tensor) else 0
            if isinstance(value, Tensor) and value.device == finite.device:
                value.copy_(torch.where(finite, value, previous))
            else:
                undo.remember(state, key, previous)
