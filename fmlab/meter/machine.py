"""What this machine can do at most: operations a second, and bytes a second from memory.

Measured as a program of ours would see them, by the best of a few runs: a ceiling, not an average.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """Ceilings of one device.

    flops: floating point operations a second in large matrix products (a multiply-add is 2).
    bandwidth: bytes a second read from memory.
    """

    flops: float
    bandwidth: float

    @property
    def balance(self) -> float:
        """Operations that this machine does while it reads one byte: below that, memory is the limit."""
        return self.flops / self.bandwidth

    def seconds(self, flops: float, nbytes: float) -> float:
        """Least time for so much work, if computing and reading overlap (Williams et al. 2009)."""
        return max(flops / self.flops, nbytes / self.bandwidth)


def measure_machine(dtype: torch.dtype = torch.float32, size: int = 1024, repeats: int = 5) -> Machine:
    """Measure the CPU with the threads torch uses now, in about half a second.

    flops: a product of two [size,size] matrices. bandwidth: a matrix of 128 MB times a vector, which reads
    each number once and does next to nothing with it.
    """
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    out = torch.empty_like(a)
    rows = 128 * 2**20 // (4096 * a.itemsize)
    large, vector = torch.ones(rows, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
    compute = _best(lambda: torch.mm(a, b, out=out), repeats)
    read = _best(lambda: torch.mv(large, vector), repeats)
    return Machine(2 * size**3 / compute, large.nbytes / read)


def _best(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
