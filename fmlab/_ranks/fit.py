"""How many ranks this machine can run."""

import os
import warnings
from pathlib import Path

import psutil

BYTES_PER_RANK = 100 << 20  # own memory of a rank that does small work; an idle one has well under 50 MB
BYTES_SHARED = 300 << 20  # torch and what it imports, once for all ranks
_CGROUP = Path("/sys/fs/cgroup")


def check_count(n: int, threads: int = 1) -> None:
    """ValueError unless n is a number of ranks and `threads` one of threads."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of ranks must be a whole number of at least 1, not {n!r}")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")


def check_fits(n: int, threads: int = 1) -> None:
    """ValueError when n ranks cannot run on this machine; a warning when they will be slow."""
    check_count(n, threads)
    free = available_memory()
    need = BYTES_SHARED + n * BYTES_PER_RANK
    if need > free:
        most = max(0, (free - BYTES_SHARED) // BYTES_PER_RANK)
        raise ValueError(
            f"{n} ranks need about {need >> 20} MiB but {free >> 20} MiB are available here; "
            f"at most {most} ranks fit"
        )
    cores = os.cpu_count() or 1
    if n > max(64, 16 * cores):
        raise ValueError(f"{n} ranks on {cores} cores would mostly wait; use at most {max(64, 16 * cores)}")
    if n > 4 * cores:
        warnings.warn(f"{n} ranks share {cores} cores: expect slow collectives", stacklevel=3)


def available_memory() -> int:
    """Bytes this process and its children may still take: of the machine, or of the container if less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            cache = int(stat.get("inactive_file", 0)) + int(
                stat.get("active_file", 0)
            )  # given back on demand
            free = min(free, int(limit) - used + cache)
    except (OSError, ValueError):
        pass  # no container limit to read
    return max(free, 0)
