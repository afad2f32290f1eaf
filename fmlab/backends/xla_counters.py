"""What torch_xla really did: programs compiled, programs run, numbers read by the host, buffers given away.

with counted() as done:
    ...
done.compiles, done.runs, done.reads

with host_reads() as reads:      # slower, and says where
    ...
print(reads)
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# operations whose result is a number of the host, or has a shape that depends on values
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"}
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass
class XLACounts:
    """Filled when the block ends.

    compiles: programs that were compiled; each is a set of shapes and operations not seen before
    runs:     programs that the device ran
    reads:    copies from the device to the host, each of which waits for the device
    donated:  input buffers given to the program of the last compilation, to write results into
    seconds:  time in the compiler
    """

    compiles: int = 0
    runs: int = 0
    reads: int = 0
    donated: int = 0
    seconds: float = 0.0


@contextmanager
def counted() -> Iterator[XLACounts]:
    """Count what happens in the block; what was noted down before it is compiled and run first, uncounted."""
    xla, metrics = import_module("torch_xla"), import_module("torch_xla.debug.metrics")
    wait = import_module("torch_xla.core.xla_model").wait_device_ops  # runs are counted when they end
    xla.sync(wait=True)
    wait()
    before = _now(metrics)
    counts = XLACounts()
    try:
        yield counts
    finally:
        wait()
        after = _now(metrics)
        counts.compiles, counts.runs, counts.reads = (int(after[i] - before[i]) for i in range(3))
        counts.seconds = after[3] - before[3]
        samples = (metrics.metric_data("InputOutputAliasCount") or (0, 0, ()))[2]
        counts.donated = int(samples[-1][1]) if counts.compiles and samples else 0


def _now(metrics: Any) -> tuple[float, float, float, float]:
    compile_time = metrics.metric_data("CompileTime") or (0, 0.0)
    reads = metrics.metric_data("TransferFromDeviceTime") or (0,)
    runs = metrics.metric_data("ExecuteTime") or (0,)
    return compile_time[0], runs[0], reads[0], compile_time[1] / 1e9


def graph_size(tensors: Sequence[torch.Tensor]) -> int:
    """Operations noted down and not yet run that these tensors need."""
    text: str = import_module("torch_xla")._XLAC._get_xla_tensors_text(list(tensors))
    return sum(" = " in line for line in text.splitlines())


@dataclass(frozen=True)
class HostRead:
    """One read: the operation that asked for the value, and the line of the program that caused it."""

    operation: str
    file: str
    line: int
    code: str

    def __str__(self) -> str:
        cell = "ipykernel" in self.file or self.file.startswith("<")  # has a new name at each run
        where = f"line {self.line} of the cell" if cell else f"{Path(self.file).name}:{self.line}"
        return f"{where}: {self.code}   ({self.operation})"


@dataclass
class HostReads:
    """The reads of a block, in order."""

    found: list[HostRead] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        return "\n".join(map(str, self.found)) or "no read by the host"


@contextmanager
def host_reads() -> Iterator[HostReads]:
    """Note every operation of the block that makes the host wait for a value of the device, with its line."""
    reads = HostReads()
    with _Watch(reads):
        yield reads


class _Watch(TorchDispatchMode):
    """Sees each operation of its thread before the device does."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        leaves = name == "_to_copy" and _on_device(args[:1]) and _is_host(kwargs.get("device"))
        leaves = leaves or (name == "copy_" and _on_device(args[1:2]) and args[0].device.type == "cpu")
        if leaves:
            self.reads.found.append(_caller("copy to the host"))
        elif _on_device(args[:1]) and (name in _READS or (name == "index" and _by_mask(args[1]))):
            self.reads.found.append(_caller("index by a mask" if name == "index" else name))
        return func(*args, **kwargs)


def _on_device(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.device.type not in ("cpu", "meta") for arg in args)


def _by_mask(indices: Sequence[Any]) -> bool:
    """x[mask] is as long as the mask has trues: a shape that depends on values."""
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _caller(operation: str) -> HostRead:
    """The nearest frame that belongs neither to torch nor to this folder."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    if frame is None:
        return HostRead(operation, "?", 0, "")
    import linecache

    file, line = frame.f_code.co_filename, frame.f_lineno
    return HostRead(operation, file, line, linecache.getline(file, line).strip())
