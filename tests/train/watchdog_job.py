"""A small job whose ranks go wrong on purpose: python -m tests.train.watchdog_job RANK SIZE PORT OUT FAULT.

Rank 1 is the one at fault. No launcher is needed: the first rank keeps the store.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from fmlab.train.alarm import Alarm
from fmlab.train.watchdog import recorded, watching

LIMIT = 2.0  # seconds


def main(rank: int, size: int, port: int, out: str, fault: str) -> None:
    with recorded(check="checked" in fault):
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        x = torch.ones(4)
        dist.all_reduce(x)
        with watching(LIMIT, rank, size, out):
            if (fault, rank) == ("sleeps, one is slow", 2):
                ask = Alarm.is_speaker
                Alarm.is_speaker = lambda self: (time.sleep(2), ask(self))[1]  # type: ignore[method-assign]
            steps = 2 if (fault, rank) == ("unequal", 1) else 3
            for step in range(steps):
                dist.all_reduce(x)
                if step == 1 and rank == 1:
                    go_wrong(fault, x)
                if step == 1 and fault == "groups":  # each pair in another order
                    order = pairs if rank == 0 else pairs[::-1]
                    for pair in order:
                        if rank in dist.get_process_group_ranks(pair):
                            dist.all_reduce(x, group=pair)
                    if rank == 2:
                        dist.broadcast(x, 0)
        dist.destroy_process_group()


def go_wrong(fault: str, x: torch.Tensor) -> None:
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.startswith("sleeps"):
        time.sleep(60)
    elif fault == "raises":
        raise KeyError("a batch without labels")
    elif fault.startswith("shape"):
        dist.all_reduce(torch.ones(5))
    elif fault.startswith("type"):
        dist.all_reduce(x.double())
    elif fault == "other group":
        dist.new_group([1])
        dist.broadcast(x, 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:6])
