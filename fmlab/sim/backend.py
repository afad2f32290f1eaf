"""Simulated chips as a backend: `get_backend("sim:h100")`, `fmlab train gpt2-tiny --backend sim:trn2`.

Importing this module makes no device: that happens when a backend is created.
"""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fmlab.backends.base import Backend
from fmlab.chips import chips

if TYPE_CHECKING:
    from fmlab.sim.simulated import Simulated

F = TypeVar("F", bound=Callable[..., Any])


class Sim(Backend):
    """One process drives one simulated chip, its times modelled. Each of several ranks has its chip as sim:0.

    chip: the simulated chip. Where `fmlab.sim.simulate` has put a chip of this name behind the index before,
    with whatever settings, it is that one.

    On torch 2.9 there is no device of its own: tensors are the CPU's, and operators on them are charged to
    the chip from the creation of the backend on (see fmlab.sim.mode).
    """

    name = "sim"
    distributed_backend = "cpu:gloo,sim:gloo"
    precisions = ("fp32", "bf16", "fp16")

    def __init__(self, chip: "Simulated") -> None:
        self.chip = chip
        self.device = chip.device
        self.static_shapes = chip.compiled  # type: ignore[misc]
        if self.device.type == "cpu":
            self.distributed_backend = "gloo"
        else:
            from fmlab.sim import attached

            attached.set_current(chip.index)

    @classmethod
    def is_available(cls) -> bool:
        return torch._C._get_privateuse1_backend_name() in ("privateuseone", "sim")

    @classmethod
    def why_absent(cls) -> str:
        if cls.is_available():
            return ""
        taken = torch._C._get_privateuse1_backend_name()
        return f"torch has room for one device from outside, and this process has {taken!r} there already"

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        return tuple(chips())

    @classmethod
    def create(cls, variant: str | None, index: int) -> "Sim":
        """Raises ValueError without a chip's name, unless one is attached at `index` already."""
        from fmlab.sim import attached, device, mode
        from fmlab.sim.attach import simulate

        if os.environ.get("LOCAL_RANK") == str(index):
            index = 0  # of several ranks each sees its own chip alone
        present = attached.CHIPS.get(index)
        if present is not None and variant in (None, present.chip.name):
            return cls(present)
        if variant is None:
            raise ValueError(f"name the chip to simulate: {', '.join(f'sim:{name}' for name in chips())}")
        if device.is_possible():
            return cls(simulate(variant, first=index)[0])
        return cls(mode.enter(variant, index))

    def device_count(self) -> int:
        from fmlab.sim import attached

        return len(attached.CHIPS)

    def describe(self) -> str:
        how = "compiled" if self.chip.compiled else "eager"
        return f"{self.device} = {self.chip.chip.title}, simulated ({how}); its times are modelled"

    # region order of work
    def synchronize(self) -> None:
        self.chip.synchronize()

    def step(self) -> Any:
        """Closes the graph at the end of the block (compiled execution)."""
        return _Closing(self.chip)

    def stream(self) -> Any:
        if self.device.type != "sim":
            return None
        from fmlab.sim.streams import Stream

        return Stream(self.device)

    def modelled_seconds(self) -> float:
        return self.chip.seconds

    # endregion

    # region memory
    def memory_stats(self) -> dict[str, int]:
        """Bytes on the simulated chip; "total" is absent where the memory was given no limit."""
        memory = self.chip.memory
        stats = {"current": memory.live, "peak": memory.peak}
        return stats if memory.capacity is None else {**stats, "total": memory.capacity}

    def reset_peak_memory(self) -> None:
        self.chip.memory.reset_peak()

    def memory_summary(self) -> str:
        return self.chip.memory.summary()

    # endregion

    def _compile(self, fn: F, settings: dict[str, Any]) -> F:
        """`fn`, charged as compiled execution whatever the chip's software does; its numbers do not change.

        fullgraph: a host read inside raises RuntimeError.
        """
        options: Mapping[str, Any] = settings.get("options") or {}
        if options:
            raise ValueError(f"the simulated compiler has no options, got {', '.join(options)}")
        chip = self.chip

        @wraps(fn)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            before = chip.compiled, chip.forbid_host_reads
            chip.compiled, chip.forbid_host_reads = True, bool(settings.get("fullgraph"))
            try:
                return fn(*args, **kwargs)
            finally:
                chip.flush()
                chip.compiled, chip.forbid_host_reads = before

        return compiled  # type: ignore[return-value]


class _Closing:
    def __init__(self, chip: "Simulated") -> None:
        self._chip = chip

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        self._chip.flush()
