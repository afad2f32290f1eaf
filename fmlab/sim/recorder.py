"""Record what runs on tensors of the meta device, charged to a chip: shapes in, events out."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab.chips import Chip
from fmlab.sim.charge import Cost, cost_of, dtype_name, tensors_in
from fmlab.sim.event import Event
from fmlab.sim.plan import plan_of

Rate = Callable[[Cost], tuple[float, str]]  # what an operator costs -> (seconds, what limits it)


def roofline_rate(chip: Chip, dtype: torch.dtype, achievable: bool = False) -> Rate:
    """Seconds by the chip's roofline, at its published peak or at the rate that somebody measured.

    An operand type without a rate of its own (fp32 sums on a chip with no figure for them) takes that of
    `dtype`. Raises ValueError if that has none.
    """
    usual = chip.roofline(dtype, achievable)
    lines = {dtype_name(dtype): usual}

    def rate(cost: Cost) -> tuple[float, str]:
        name = cost.dtype
        if name not in lines:
            try:
                lines[name] = chip.roofline(name, achievable) if name else usual
            except ValueError:
                lines[name] = chip.roofline(name) if _has(chip, name) else usual
        line = lines[name]
        return line.seconds(cost.flops, cost.bytes), line.bound(cost.flops, cost.bytes)

    return rate


def _has(chip: Chip, dtype: str) -> bool:
    try:
        chip.peak_flops(dtype)
    except ValueError:
        return False
    return True


class Recorder(TorchDispatchMode):
    """The events of a block of code, and the bytes that it made and still holds.

    Tensors that existed before are not counted. Ends of life are seen as they happen, so what autograd keeps
    between forward and backward is alive.
    """

    def __init__(self, rate: Rate, module: str = "") -> None:
        super().__init__()
        self.rate, self.module = rate, module
        self.events: list[Event] = []
        self.live = self.peak = 0
        self.clock = 0.0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plan = plan_of(func)
        inputs = tensors_in([*args, *kwargs.values()])
        before = {id(tensor.untyped_storage()) for tensor in inputs}
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if id(storage) not in before and storage not in self.known:
                self.known.add(storage)
                self._grow(storage.nbytes())
                weakref.finalize(storage, self._shrink, storage.nbytes()).atexit = False
        cost = cost_of(plan, args, kwargs, inputs, result)
        if cost.flops or cost.bytes:
            seconds, bound = self.rate(cost)
            first = outputs[0] if outputs else None
            self.events.append(
                Event(
                    "compute",
                    plan.name,
                    seconds,
                    cost.flops,
                    cost.bytes,
                    cost.dtype or (dtype_name(first.dtype) if first is not None else ""),
                    live_bytes_after=self.live,
                    module=self.module,
                    shape=tuple(first.shape) if first is not None else (),
                    bound=bound,
                )
            )
        return result

    def _grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _shrink(self, size: int) -> None:
        self.live -= size
