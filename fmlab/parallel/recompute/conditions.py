"""What a forward pass depends on besides its arguments, written down so that it can be run again exactly."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fmlab.models.dropout import current_masks, drawing_masks


class Conditions:
    """The random number generators, autocast and dropout masks of this moment, on the CPU and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.random = _random_state(device)
        self.autocast = [_autocast(kind) for kind in dict.fromkeys(("cpu", device.type))]
        self.masks = current_masks()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all is as it was; afterwards, as it is now."""
        now = _random_state(self.device)
        with ExitStack() as stack:
            stack.callback(_set_random_state, self.device, now)
            _set_random_state(self.device, self.random)
            for settings in filter(None, self.autocast):
                stack.enter_context(torch.autocast(**settings))
            stack.enter_context(drawing_masks(self.masks))
            stack.enter_context(torch.enable_grad())
            yield


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _autocast(kind: str) -> dict[str, Any] | None:
    if not torch.amp.is_autocast_available(kind):
        return None
    return dict(
        device_type=kind,
        enabled=torch.is_autocast_enabled(kind),
        dtype=torch.get_autocast_dtype(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
