"""What a backend must do, and the part that is the same on every device.

To add a backend, add a file to this folder with a subclass of `Backend` called BACKEND; the registry
finds it by the file's name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from fmlab.backends.interface import choose_interface
from fmlab.backends.moving import Moved, host_copy, move

Precision = Literal["fp32", "bf16", "fp16"]
MatmulPrecision = Literal["highest", "high", "medium"]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Backend(ABC):
    """A kind of device: moving data there, waiting for it, seeding, precision, compiling, memory.

    name:                what `get_backend` calls it
    device:              the torch device of this process
    distributed_backend: the name of the process-group backend that carries its tensors
    precisions:          what `autocast` accepts
    static_shapes:       whether each new shape waits for a compilation, unless told otherwise
    dynamic_compile:     whether `compile` takes dynamic=True
    lazy:                whether operations are only noted down until `step` or `synchronize` runs them, so
                         that a read in between cuts a program in two
    """

    name: ClassVar[str]
    distributed_backend: str
    precisions: ClassVar[tuple[Precision, ...]] = ("fp32", "bf16")
    static_shapes: ClassVar[bool] = False
    dynamic_compile: ClassVar[bool] = True
    lazy: ClassVar[bool] = False
    device: torch.device

    # region finding it
    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether this machine has such a device and the software to use it. Never raises."""

    @classmethod
    def why_absent(cls) -> str:
        """What to install or to do when it is not available, as a sentence; "" when there is nothing to say.

        Never raises.
        """
        return ""

    @classmethod
    def automatic(cls) -> bool:
        """Whether "auto" may choose it where it is available. Never raises; loads nothing."""
        return True

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """The legal words after a colon in the name ("sim:trn2"); empty when there are none."""
        return ()

    @classmethod
    @abstractmethod
    def create(cls, variant: str | None, index: int) -> "Backend":
        """The backend for device number `index` of this host."""

    @abstractmethod
    def device_count(self) -> int:
        """How many such devices this host has."""

    def describe(self) -> str:
        """One line for a log: the device and what this process does there."""
        return f"{self.name} on {self.device}"

    # endregion

    # region order of work
    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all work given to it."""

    def step(self) -> AbstractContextManager[Any]:
        """Encloses the forward and backward pass of a micro-batch, or the update of the weights.

        A lazy device only notes operations down; at the end of this block it runs what was noted. Without
        it the graph of a step grows with every micro-batch. Elsewhere it does nothing.
        """
        return nullcontext()

    def modelled_seconds(self) -> float | None:
        """What a simulated device's clock shows; None on a real one, whose time is measured."""
        return None

    def stream(self) -> Any:
        """A new queue of work beside the current one, for `on`; None where the device orders work itself.

        Work on two queues has no order: make one wait for the other (`wait_stream`) where one reads what the
        other writes.
        """
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work that is given to the device in this block goes to `stream`; None is the current one."""
        return nullcontext() if stream is None else stream

    # endregion

    # region memory
    def memory_stats(self) -> dict[str, int]:
        """Bytes: "current" and "peak" of this process, "total" of the device.

        A key is absent where the device does not tell; nothing is estimated here.
        """
        return {}

    def reset_peak_memory(self) -> None:
        """Count "peak" anew from here. Raises ValueError where the device counts no peak."""
        raise ValueError(
            f"the {self.name} backend cannot start a new count of peak memory; "
            "fmlab.meter.peak_memory counts the bytes of live tensors on every device"
        )

    def memory_summary(self) -> str:
        """What is known of the device's memory, for people."""
        stats = self.memory_stats()
        known = [f"{key} {size / 2**30:.3f} GiB" for key, size in stats.items()]
        return f"{self.device}: " + (", ".join(known) or "this device tells nothing of its memory")

    # endregion

    # region numbers
    def seed(self, seed: int) -> None:
        """Seed torch's generators of this device and of the host."""
        torch.manual_seed(seed)

    def autocast(self, precision: Precision) -> AbstractContextManager[Any]:
        """The context for a forward pass in `precision`; weights stay in fp32.

        Raises ValueError for a precision this backend does not have.
        """
        if precision not in self.precisions:
            legal = ", ".join(self.precisions)
            raise ValueError(f"the {self.name} backend has no precision {precision!r}; legal: {legal}")
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[precision])

    def set_matmul_precision(self, level: MatmulPrecision) -> None:
        """How float32 matrices are multiplied: "highest" in float32; "high" and "medium" with fewer bits.

        Raises ValueError where the device has only one way.
        """
        if level != "highest":
            raise ValueError(
                f"the {self.name} backend multiplies float32 matrices in float32 only; legal: highest"
            )

    # endregion

    # region programs
    def compile(
        self,
        fn: F,
        *,
        fullgraph: bool | None = None,
        dynamic: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> F:
        """`fn` compiled for this device: at its first call, and at each later one that needs a new program.

        fullgraph: raise where the program would be cut in pieces (a host read, a branch on data); None is
                   what this device's vendor advises.
        dynamic:   one program for several shapes; None lets the stack decide.
        options:   of the device's compiler.
        Raises ValueError for what this device's compiler does not do.
        """
        if dynamic and not self.dynamic_compile:
            raise ValueError(
                f"the compiler of the {self.name} backend has no dynamic shapes: each new shape compiles "
                "anew; leave dynamic unset and give the step few shapes (pad to fixed lengths, drop the last "
                "partial batch)"
            )
        wanted = {"fullgraph": fullgraph, "dynamic": dynamic, "options": dict(options) if options else None}
        # Left out, not None: torch_tpu chooses dynamic=False only where nothing was said.
        return self._compile(fn, {key: value for key, value in wanted.items() if value is not None})

    def _compile(self, fn: F, settings: dict[str, Any]) -> F:
        compiled: Any = torch.compile(fn, **settings)
        return compiled

    def checkpoint(self, fn: Callable[..., T], *args: Any, preserve_rng_state: bool = True) -> T:
        """`fn(*args)` that keeps no activations for backward: they are computed again there.

        preserve_rng_state: give the second run the random numbers of the first.
        """
        result: T = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return result

    # endregion

    # region moving
    def to_device(self, obj: T, non_blocking: bool = False) -> T:
        """Move a tensor, a module, or a dict, list or tuple of them to this device.

        A module is moved in place and its tied weights are tied again: on devices whose tensors cannot
        replace host storage, `module.to` makes a new parameter for each place that holds it, and the
        copies drift apart in silence. There an optimizer must be made after the move. What is one tensor at
        two places of a container stays one.

        non_blocking: do not wait for copies from pinned host memory; elsewhere it changes nothing.
        """
        return move(obj, lambda value: self._move(value, non_blocking), Moved())

    def to_host(self, obj: T) -> T:
        """The same container with a copy of each tensor in host memory, ties kept: what a file is written
        from. Waits for the device; a module is refused (ValueError), since it would leave the device: give
        its state_dict().
        """
        self.synchronize()
        return host_copy(obj)

    def _move(self, obj: Any, non_blocking: bool) -> Any:
        return obj.to(self.device, non_blocking=non_blocking)

    # endregion

    # region ranks
    def distributed_options(self) -> dict[str, Any]:
        """What `torch.distributed.init_process_group` must be told beside the backend's name.

        Call it just before: where gloo connects the ranks, it is told its network interface here. Raises
        ValueError like `choose_interface`.
        """
        if "gloo" in self.distributed_backend:
            choose_interface()
        return {}

    # endregion

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r})"
