"""What this machine can do at most: operations a second, and bytes a second from memory.

Measured as a program of ours would see them, by the best of a few runs: a ceiling, not an average. Other
programs on the machine, and fewer threads, lower it.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from fmlab.chips import Chip, dtype_name

# Bytes: more than a laptop's caches hold. A server's last cache may hold it; then its speed is what is
# measured, and what programs of this size get there.
LARGE = 128 * 2**20


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
    return Machine(matmul_rate(dtype, size, repeats), read_bandwidth(LARGE, repeats, dtype))


def measure_chip(
    name: str = "this machine",
    dtypes: Sequence[Any] = ("fp32", "bf16"),
    size: int = 1024,
    repeats: int = 5,
    link_bandwidth: float | None = None,
) -> Chip:
    """This CPU, with the threads torch uses now, as a chip like those of `fmlab.chips`; about a second.

    Its memory is what the host has; its on-chip memory is the largest cache, where the system names it.
    link_bandwidth: bytes a second that one rank sends to others (`fmlab bench chip` measures it).
    """
    rates = {dtype_name(dtype): matmul_rate(_torch_dtype(dtype), size, repeats) for dtype in dtypes}
    return Chip.measured(
        name,
        rates,
        memory_bandwidth=read_bandwidth(LARGE, repeats),
        memory_bytes=psutil.virtual_memory().total,
        link_bandwidth=link_bandwidth,
        on_chip_bytes=largest_cache(),
        how=f"measured on {platform.machine()} with {torch.get_num_threads()} threads of torch "
        f"{torch.__version__}: a product of {size} x {size}, a read of {LARGE >> 20} MiB",
    )


def matmul_rate(dtype: torch.dtype = torch.float32, size: int = 1024, repeats: int = 5) -> float:
    """Floating point operations a second in a product of two [size,size] matrices of `dtype`."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / best_seconds(lambda: torch.mm(a, b, out=out), repeats)


def read_bandwidth(nbytes: int = LARGE, repeats: int = 5, dtype: torch.dtype = torch.float32) -> float:
    """Bytes a second when a matrix of `nbytes` is read again and again: a matrix times a vector.

    What fits into a cache is read from there, so that a sweep over `nbytes` shows the levels of memory.
    """
    columns = min(4096, max(64, nbytes // dtype.itemsize // 64))
    rows = max(1, nbytes // (columns * dtype.itemsize))
    matrix, vector = torch.ones(rows, columns, dtype=dtype), torch.ones(columns, dtype=dtype)
    out = torch.empty(rows, dtype=dtype)
    calls = max(1, LARGE // 8 // matrix.nbytes)  # enough for the clock

    def read() -> None:
        for _ in range(calls):
            torch.mv(matrix, vector, out=out)

    return calls * matrix.nbytes / best_seconds(read, repeats)


def largest_cache() -> int | None:
    """Bytes of the largest cache of the first core, or None where the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        units = {"K": 2**10, "M": 2**20, "G": 2**30}
        if text[-1:] in units and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=None)


def best_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """The least time of so many calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _torch_dtype(dtype: Any) -> torch.dtype:
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    name = dtype_name(dtype)
    if name not in names:
        raise ValueError(f"no matrix product of dtype {dtype!r} is measured; legal: {', '.join(names)}")
    return names[name]
