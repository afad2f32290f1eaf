"""torch's DistributedDataParallel under the engine contract."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fmlab.parallel.ddp.replicated import Replicated
from fmlab.parallel.layout import Batch


class TorchDataParallel(Replicated):
    """Data parallelism by torch.nn.parallel.DistributedDataParallel.

    DDP divides the sum of the ranks' gradients by their number; the loss is multiplied by it beforehand,
    so that the result is the plain sum. What DDP wraps is the whole computation of the loss, so that a
    rank without a target can take part with a loss of zero.
    """

    name = "torch"

    def __init__(self, *args: Any, find_unused_parameters: bool = True, **kwargs: Any) -> None:
        """find_unused_parameters: search the graph of each step for parameters that took no part. Without
        it DDP is a little faster and raises when there are some."""
        super().__init__(*args, **kwargs)
        with warnings.catch_warnings():
            # torch 2.13 deprecates a name whose replacement older versions do not know
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            self.ddp = DistributedDataParallel(
                _Loss(self),
                process_group=self.group,
                bucket_cap_mb=self.layout.bucket_mb,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # the engine has made them equal
                find_unused_parameters=find_unused_parameters,
            )
        self._ranks = dist.get_world_size(self.group)

    # region accumulate
    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        sums = self._zero_sums()
        batches: list[Batch | None] = [*self._with_targets(micro_batches)] or [None]
        for i, batch in enumerate(batches):
            with nullcontext() if i == len(batches) - 1 else self.ddp.no_sync():
                share, of_batch = self.ddp(batch, counts)
                (share * self._ranks).backward()  # undoes DDP's division by the number of ranks
            sums += of_batch
        return self._sum_over_ranks(sums)

    # endregion


class _Loss(nn.Module):
    """From a batch to its share of the loss, as the module that DDP wraps."""

    def __init__(self, engine: TorchDataParallel) -> None:
        super().__init__()
        self.model = engine.model
        self._engine = [engine]  # in a list, so that nn.Module does not take it for a part of itself

    def forward(self, batch: Batch | None, counts: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        engine = self._engine[0]
        if batch is not None:
            return engine._forward(batch, counts)
        zeros = [parameter.sum() * 0.0 for parameter in engine.ledger.trainable().values()]
        return sum(zeros[1:], zeros[0]), engine._zero_sums()
