"""The host's own processor."""

import resource
import sys

import psutil
import torch

from fmlab.backends.base import Backend


class CPU(Backend):
    """Always there. One process is one device."""

    name = "cpu"
    distributed_backend = "gloo"
    device = torch.device("cpu")

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def create(cls, variant: str | None, index: int) -> "CPU":
        return cls()

    def synchronize(self) -> None:
        """Nothing to wait for: every call on this device returns when its work is done."""

    def device_count(self) -> int:
        return 1

    def memory_stats(self) -> dict[str, int]:
        """Resident memory of this process, now and at its highest, and the memory of the host."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "current": psutil.Process().memory_info().rss,
            "peak": peak if sys.platform == "darwin" else peak * 1024,  # Linux counts in KiB
            "total": psutil.virtual_memory().total,
        }


BACKEND = CPU
