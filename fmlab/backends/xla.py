"""Any device that torch_xla drives: a TPU, a first-generation Trainium, or the CPU, by one path.

A tensor on the device "xla" is lazy: an operation on it is only noted down. `step` and `synchronize` hand
what was noted to the XLA compiler, which makes one program of it, and the device runs that. A program is kept
by its shapes: a second step of the same shapes compiles nothing. See xla_counters, xla_program and xla_spmd.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import psutil
import torch

from fmlab.backends.base import Backend
from fmlab.backends.stacks import XLA as STACK
from fmlab.backends.xla_environment import configure

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_SUPPORTED = ((2, 9), (2, 10))  # from and below: versions of torch that torch_xla 2.9 was made for


class XLA(Backend):
    """One process drives one device: number `index` of those that torch_xla shows it."""

    name = "xla"
    distributed_backend = "xla"
    static_shapes = True
    dynamic_compile = False
    lazy = True

    def __init__(self, index: int = 0) -> None:
        """Raises ValueError when this process can no longer take torch_xla in; says what to do first."""
        configure()
        self._xla: Any = import_module("torch_xla")
        self._runtime: Any = import_module("torch_xla.runtime")
        self._model: Any = import_module("torch_xla.core.xla_model")
        self._xla.device_count()  # starts the runtime, also in SPMD mode
        self.device = self._xla.device(index if index else None)
        self.kind: str = self._runtime.device_type()
        self._check_autograd()

    @classmethod
    def is_available(cls) -> bool:
        return not cls.why_absent()

    @classmethod
    def why_absent(cls) -> str:
        if STACK.version() is None:
            return f"{STACK.problem()}; in the repository: make lab-xla"
        try:
            configure()  # torch_xla chooses a device when it is loaded, aloud
        except ValueError as error:
            return str(error)
        version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if not _SUPPORTED[0] <= version < _SUPPORTED[1]:
            return f"torch_xla {STACK.version()} needs torch 2.9, and this is torch {torch.__version__}"
        return STACK.problem()

    @classmethod
    def automatic(cls) -> bool:
        """On the CPU, lessons apart, torch itself is the better choice."""
        return os.environ.get("PJRT_DEVICE", "CPU").upper() != "CPU"

    @classmethod
    def create(cls, variant: str | None, index: int) -> "XLA":
        return cls(index)

    def device_count(self) -> int:
        return int(self._xla.device_count())

    def describe(self) -> str:
        return f"torch_xla {STACK.version()} on {self.device_count()} x {self.kind} ({self.device})"

    def synchronize(self) -> None:
        """Compile and run what was noted down, and wait until the device is done."""
        self._xla.sync(wait=True)
        self._model.wait_device_ops()

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is noted down in this block becomes one program, which starts at its end. Reading a number in
        the block cuts the program in two and makes the host wait: see xla_counters.host_reads.
        """
        yield
        self._xla.sync()

    def seed(self, seed: int) -> None:
        """Seed the device and the host; torch.manual_seed alone does not reach the device."""
        torch.manual_seed(seed)
        self._xla.manual_seed(seed % (1 << 63))

    def memory_stats(self) -> dict[str, int]:
        """Of a TPU or Trainium what its runtime tells. torch_xla counts nothing on the CPU; there "total" is
        the memory of the host.
        """
        if self.kind == "CPU":
            return {"total": psutil.virtual_memory().total}
        return known_memory(self._model.get_memory_info(self.device))

    def _compile(self, fn: F, settings: dict[str, Any]) -> F:
        """`fn` as one program: torch_xla's own tracing, where every operation is already noted down.

        fullgraph: a read by the host inside raises RuntimeError, rather than cutting the program.
        """
        if settings.get("options"):
            raise ValueError("torch_xla takes options of its compiler from XLA_FLAGS, before it starts")
        full = bool(settings.get("fullgraph"))

        @wraps(fn)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            with self._xla.compile(full_graph=full, name=getattr(fn, "__name__", "compiled")):
                return fn(*args, **kwargs)

        return cast(F, compiled)

    def checkpoint(self, fn: Callable[..., T], *args: Any, preserve_rng_state: bool = True) -> T:
        """See Backend.checkpoint. torch's own version is undone here: the compiler finds that the second run
        repeats the first and keeps its results. torch_xla's puts a barrier between the two.
        """
        checkpoint = import_module("torch_xla.utils.checkpoint").checkpoint
        result: T = checkpoint(fn, *args, use_reentrant=True, preserve_rng_state=preserve_rng_state)
        return result

    def distributed_options(self) -> dict[str, Any]:
        """Raises ValueError on the CPU, where torch_xla's collectives between processes end in an abort."""
        if self.kind == "CPU":
            raise ValueError(
                "torch_xla cannot train with several processes on the CPU: their collectives never meet. "
                "Start one process, or share one program between virtual devices: fmlab.parallel.spmd"
            )
        import_module("torch_xla.distributed.xla_backend")  # registers the process-group backend
        return {"init_method": "xla://"}

    def _check_autograd(self) -> None:
        """torch's autograd counts the devices at the first backward pass of a process, and never again."""
        try:
            with torch.enable_grad():  # a backend may be made where gradients are switched off
                torch.ones((), device=self.device, requires_grad=True).mul(1.0).backward()
        except RuntimeError as error:
            if "device_ready_queues" not in str(error):
                raise
            raise ValueError(
                "a backward pass ran in this process before its first use of torch_xla, and torch's autograd "
                "does not see devices that come later: restart (in a notebook: Kernel, Restart) and call "
                "get_backend('xla') before the first backward()"
            ) from None


def known_memory(info: dict[str, int]) -> dict[str, int]:
    """The numbers of xm.get_memory_info under our names: bytes now, at the highest, and of the device."""
    names = {"bytes_used": "current", "peak_bytes_used": "peak", "bytes_limit": "total"}
    return {ours: int(info[theirs]) for theirs, ours in names.items() if theirs in info}


BACKEND = XLA
