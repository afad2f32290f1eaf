"""The data-parallel training step by hand."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from fmlab.parallel.ddp.reducer import Reducer
from fmlab.parallel.ddp.replicated import Replicated
from fmlab.parallel.ddp.timeline import Timeline
from fmlab.parallel.layout import Batch


class DataParallel(Replicated):
    """Each rank runs its own micro-batches; gradients are summed over ranks during the last backward pass.

    The sum needs no division: each rank has divided its losses by the count of all ranks' targets before.
    That is right for any distribution of targets, where an average of the ranks' means is not.
    """

    name = "fmlab"
    dropout_seed = 0
    reducer_class: ClassVar[type[Reducer]] = Reducer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bucket_bytes = self.layout.bucket_mb * 2**20
        self.reducer = self.reducer_class(self.ledger.trainable(), self.group, bucket_bytes)

    # region accumulate
    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        self.reducer.start()
        sums = self._zero_sums()
        batches = self._with_targets(micro_batches)
        for i, batch in enumerate(batches):
            share, of_batch = self._forward(batch, counts)
            if i == len(batches) - 1:
                self.reducer.expect_last_backward()  # only this backward pass communicates
            share.backward()
            sums += of_batch
        return self.reducer.finish(sums)  # also where this rank had no target at all

    # endregion

    def record_next_step(self) -> Timeline:
        """Record the events of the next step; the returned timeline is filled by it."""
        self.reducer.timeline = Timeline()
        return self.reducer.timeline

    def close(self) -> None:
        super().close()
        self.reducer.close()
