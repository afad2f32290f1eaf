"""What both data-parallel engines (by hand and torch's) share: equal replicas, and ranks that agree."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fmlab.backends import Backend
from fmlab.parallel.ddp import replicas
from fmlab.parallel.engine import Engine, Objective, OptimizerFactory
from fmlab.parallel.layout import Layout


class Replicated(Engine):
    """Whole replicas on the ranks of `group` (default: all). Starts from the first rank's weights."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        objective: Objective,
        optimizer: OptimizerFactory,
        backend: Backend,
        max_grad_norm: float | None = None,
        group: Any = None,
    ) -> None:
        """Raises ValueError when the ranks' models differ, or when one has batch norm."""
        super().__init__(model, layout, objective, optimizer, backend, max_grad_norm)
        self.group = dist.group.WORLD if group is None else group
        if self.whole_batch:  # it must see the samples of all ranks
            self.objective = objective.across(self.group)  # type: ignore[attr-defined]
        replicas.check_same_model(model, self.group)
        replicas.check_no_batch_statistics(model)
        replicas.broadcast_from_first(model, self.group)

    def differing_replicas(self) -> list[str]:
        """Names of parameters that are not bitwise equal on all ranks (none, if all is well)."""
        return replicas.differing(self.full_params(), self.group)

    @property
    def ranks(self) -> Any:
        return self.group

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def _agree(self, names: list[str]) -> list[str]:
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, names, group=self.group)
        known = [theirs for theirs in every if theirs]
        if not known:
            raise ValueError("no rank has a micro-batch in its first step; give at least one rank some data")
        if any(theirs != known[0] for theirs in known):
            raise ValueError(f"the objectives of the ranks return different loss terms: {every}")
        return list(known[0])
