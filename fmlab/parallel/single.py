"""One device: the engine that all others are compared with."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor

from fmlab.parallel.engine import Engine
from fmlab.parallel.layout import Batch


class SingleDevice(Engine):
    """Runs the micro-batches one after the other and lets autograd add up their gradients."""

    name = "single"

    # region accumulate
    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        sums = self._zero_sums()
        batches = self._with_targets(micro_batches)
        for number, batch in enumerate(batches, 1):
            # what follows the last one, the update, is part of its step
            with self.backend.step() if number < len(batches) else nullcontext():
                share, of_batch = self._forward(batch, counts)
                share.backward()
                sums += of_batch
        return sums

    # endregion
