"""ZeRO's first stage by torch: DistributedDataParallel with a ZeroRedundancyOptimizer."""

import inspect
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from fmlab.parallel.engines import refusals
from fmlab.parallel.engines.torch_ddp import TorchDataParallel


class TorchZeroOne(TorchDataParallel):
    """Whole replicas; each rank updates some of the parameters, holds the optimizer's state of those only,
    and sends them to the others.

    torch hands out whole parameters, the largest first, so that the shares are as even as those allow.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for what else the layout asks of it."""
        super().__init__(*args, **kwargs)
        refusals.check("torch", self.layout, self.model)
        own = self.optimizer
        known = inspect.signature(type(own).__init__).parameters
        settings = {name: value for name, value in own.defaults.items() if name in known}
        self.optimizer = ZeroRedundancyOptimizer(
            own.param_groups, optimizer_class=type(own), process_group=self.group, **settings
        )

    @property
    def _local(self) -> Any:
        """The optimizer of this rank's share."""
        return self.optimizer.optim  # type: ignore[attr-defined]

    def full_optimizer_state(self) -> dict[str, Tensor]:
        mine = {}
        names = {id(parameter): name for name, parameter in self.ledger.parameters()}
        for parameter, state in self._local.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    mine[f"{names[id(parameter)]}/{key}"] = value.detach()
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, mine, group=self.group)
        whole = {key: value for share in every for key, value in share.items()}
        order = [name for name, _ in self.ledger.parameters()]
        return dict(sorted(whole.items(), key=lambda item: order.index(item[0].rpartition("/")[0])))

    def load(self, directory: str | Path) -> None:
        super().load(directory)
        # What was loaded lies in the outer optimizer's state, for every parameter.
        loaded = dict(self.optimizer.state)
        self.optimizer.state.clear()
        self._local.state.clear()
        for group in self._local.param_groups:
            for parameter in group["params"]:
                if parameter in loaded:
                    self._local.state[parameter] = loaded[parameter]
