"""Loss scaling for fp16: multiply the loss so that no gradient is rounded to zero; divide them again after.

Micikevicius et al. 2017, arXiv:1710.03740, sections 3.2 and 3.3 (fixed and dynamic scales).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max


class LossScaler:
    """A dynamic scale, with the rules of torch.amp.GradScaler.

    A step with a gradient that is not finite is skipped, and the scale shrinks by `backoff`; after `interval`
    good steps in a row it grows by `growth`. `scale` is the one in use, `good` how many steps went well
    since it changed.

    Raises ValueError for values that would not move the scale the right way.
    """

    def __init__(
        self, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        for name, value, legal, fine in (
            ("scale", scale, "above 0 and finite", 0 < scale < math.inf),
            ("growth", growth, "above 1 and finite", 1 < growth < math.inf),
            ("backoff", backoff, "between 0 and 1", 0 < backoff < 1),
            ("interval", interval, "at least 1", interval >= 1),
        ):
            if not fine:
                raise ValueError(f"{name} must be {legal}, got {value}")
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.good = 0

    # region scaler
    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.scale

    def unscale_(self, gradients: Iterable[Tensor]) -> bool:
        """Divide the gradients by the scale of their backward pass, in place; whether all are finite."""
        gradients = list(gradients)
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def update(self, finite: bool) -> None:
        """After every step, also one that was skipped: the scale of the next backward pass."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale *= self.backoff
        elif self.good == self.interval:
            grown = self.scale * self.growth
            self.scale, self.good = (grown if grown <= _LARGEST else self.scale), 0

    # endregion
