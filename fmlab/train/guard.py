"""What watches a run beside its steps: that ranks do not wait in vain, are not slow, and hold the same."""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

from fmlab.meter import FlightRecorder
from fmlab.train.config import TrainConfig
from fmlab.train.launch import World
from fmlab.train.replicas import differences, replica_error
from fmlab.train.setup import Run
from fmlab.train.stragglers import StragglerWatch
from fmlab.train.watchdog import recorded, watching

_RECORDED = ("gloo", "nccl")


class Guard:
    """Of one run, on each rank. Made before the ranks meet.

    A process group that exists already (as in Ranks) has someone who watches it: there no watchdog is set.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._meets = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._recorder: FlightRecorder | None = None
        self._slow: StragglerWatch | None = None

    def recording(self) -> AbstractContextManager[None]:
        """Encloses the making of the process group. Raises ValueError where check_collectives is too late."""
        check = self.config.check_collectives
        return recorded(check) if self._meets or (check and dist.is_initialized()) else nullcontext()

    @contextmanager
    def watching(self, world: World) -> Iterator[None]:
        """Encloses all that the ranks do together."""
        config, limit = self.config, self.config.collective_timeout if self._meets else 0.0
        idle = [name for name in ("compare_replicas", "check_collectives") if getattr(config, name)]
        if world.size == 1 and idle:
            warnings.warn(f"there is one rank: {' and '.join(idle)} will compare nothing", stacklevel=3)
        with watching(limit, world.rank, world.size, config.out, world.roll) as dog:
            if dog is not None:
                self._recorder = dog.flight
            elif world.size > 1 and "TORCH_FR_BUFFER_SIZE" in os.environ:
                self._recorder = FlightRecorder()
            yield

    def after_step(self, run: Run, saves: bool) -> str:
        """After a step, on every rank: what is to be told of a slow rank, or "". saves: a checkpoint comes.

        Raises ReplicaError when ranks hold different bits of the same.
        """
        config, step = self.config, run.sampler.step
        if run.world.size == 1:
            return ""
        every = config.compare_replicas
        if every and (saves or step % every == 0) and (found := differences(run.engine)):
            raise replica_error(step, found)
        if self._slow is None:
            if not config.stragglers or self._recorder is None or dist.get_backend() not in _RECORDED:
                return ""
            by_design = run.config.layout.pipeline > 1
            self._slow = StragglerWatch(self._recorder, config.stragglers, dist.group.WORLD, by_design)
        return self._slow.step()
