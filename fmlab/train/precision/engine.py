"""One device, in few bits: where products run in another type, and where the loss is scaled."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmlab.data.batch import Batch
from fmlab.parallel.engine import StepResult
from fmlab.parallel.single import SingleDevice
from fmlab.train.precision.loss_scale import LossScaler
from fmlab.train.precision.numbers import Numbers


class FewBits(SingleDevice):
    """A plain step on one device with `numbers`; the model is prepared for them already.

    scaler: of the loss, where the numbers ask for one
    """

    def __init__(self, *args: Any, numbers: Numbers, scaler: LossScaler | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.numbers = numbers
        self.scaler = (scaler or LossScaler()) if numbers.scaled else None

    # region step
    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        result = super().step(micro_batches)
        if self.scaler is not None:
            # after every step: one whose gradient overflowed shrinks the scale
            self.scaler.update(finite=math.isfinite(result.grad_norm))
        return result

    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        sums = super()._accumulate(micro_batches, counts)
        if self.scaler is not None:  # by the scale that backward used, before norm and clipping
            self.scaler.unscale_(self.ledger.gradients().values())
        return sums

    def extra_state(self) -> dict[str, Any]:
        return {} if self.scaler is None else {"scale": self.scaler.scale, "good": self.scaler.good}

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of other numbers."""
        if (self.scaler is None) != (not extra):
            raise ValueError(f"the checkpoint has {extra or 'no loss scale'}: it is of other numbers")
        if self.scaler is not None:
            self.scaler.scale, self.scaler.good = float(extra["scale"]), int(extra["good"])

    def _forward(self, batch: Batch, counts: Mapping[str, int], model: Any = None) -> tuple[Tensor, Tensor]:
        with torch.autocast(
            self.backend.device.type, self.numbers.autocast, enabled=self.numbers.autocast is not None
        ):
            share, sums = super()._forward(batch, counts, model)
        return (share if self.scaler is None else self.scaler.scaled(share)), sums

    # endregion
