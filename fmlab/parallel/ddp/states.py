"""Whole parameters on every data rank: gradients are all-reduced, everyone makes the same update."""

import torch
from torch import Tensor

from fmlab.parallel.build import Build
from fmlab.parallel.ddp.reducer import Reducer
from fmlab.parallel.states import States


class Replicas(States):
    """One `Reducer` for each set of ranks among which gradients are summed: all data ranks, or for divided
    experts those that hold the same ones."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        experts = build.mesh.axis("context", "expert_replica")
        groups = [(self.summed, False)] + ([(experts, True)] if build.layout.expert > 1 else [])
        self.reducers = []
        for axis, divided in groups:
            mine = {n: p for n, p in self.ledger.trainable().items() if self._is_expert(n) == divided}
            if axis.size > 1:
                self.reducers.append(Reducer(mine, axis.group, build.layout.bucket_mb * 2**20))

    def _is_expert(self, name: str) -> bool:
        return any(cut.axis.name == "expert" for cut in self.ledger.entries[name].cuts)

    def start(self) -> None:
        for parameter in self.ledger.trainable().values():
            parameter.grad = None
        for reducer in self.reducers:
            reducer.start()

    def last_backward(self) -> None:
        for reducer in self.reducers:
            reducer.expect_last_backward()

    def finish(self, sums: Tensor) -> Tensor:
        if self.summed.size == 1:
            return sums
        first, *others = self.reducers
        sums = first.finish(sums)
        for reducer in others:
            reducer.finish(torch.zeros(0, dtype=sums.dtype, device=sums.device))
        return sums

    def close(self) -> None:
        for reducer in self.reducers:
            reducer.close()
