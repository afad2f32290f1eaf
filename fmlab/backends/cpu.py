"""The host's own processor."""

import resource
import sys
from pathlib import Path

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
        return {
            "current": psutil.Process().memory_info().rss,
            "peak": _peak_resident(),
            "total": psutil.virtual_memory().total,
        }

    def reset_peak_memory(self) -> None:
        """Linux only: the kernel's mark of the highest resident memory starts again at the current one."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): 5 resets the peak, VmHWM
        except OSError:
            super().reset_peak_memory()


def _peak_resident() -> int:
    """Bytes. From /proc where there is one: unlike getrusage it can be reset."""
    status = Path("/proc/self/status")
    if status.exists():
        kib = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kib) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


BACKEND = CPU
