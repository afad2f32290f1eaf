"""Simulation without a device, for torch 2.9: operators on host tensors are charged to a chip.

    with simulated_mode("trn2") as chip:
        loss = model(batch); loss.backward()
    print(chip.seconds, chip.memory.summary())

There is no device to move to and none to forget: whatever runs on the CPU (or on "meta", for a dry run) in
the block counts, data preparation too. Mixed devices, streams and messages between ranks need the device
"sim" of fmlab.sim.simulate; memory, time and execution are charged in the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab.chips import Chip
from fmlab.sim import attached
from fmlab.sim.attach import make
from fmlab.sim.charge import tensors_in
from fmlab.sim.memory import claim_parameters
from fmlab.sim.plan import aten, needs_host, plan_of
from fmlab.sim.simulated import Simulated
from fmlab.sim.where import WHERE


class _Charging(TorchDispatchMode):
    def __init__(self, chip: Simulated) -> None:
        super().__init__()
        self.chip = chip

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        chip = self.chip
        if op is aten._local_scalar_dense.default:
            chip.host_read("aten::item")
            return out
        plan = plan_of(op)
        inputs = [t for value in (*args, *kwargs.values()) for t in tensors_in(value)]
        self._enter(inputs, op, "other")
        if needs_host(plan, inputs):
            chip.host_read(plan.name)
        factory = plan.has_device and not inputs and not WHERE.stack
        self._enter(tensors_in(out), op, "other" if factory else _line())
        chip.charge(plan, args, kwargs, inputs, out)
        return out

    def _enter(self, tensors: list[Tensor], op: Any, line: str) -> None:
        for tensor in tensors:
            if tensor.layout == torch.strided:
                block = self.chip.memory.enter(tensor, line, op._schema.name, WHERE.here()[0])
                if WHERE.accumulating():
                    block.move_to("gradients")


def _line() -> str:
    return "optimizer states" if WHERE.optimizing else "activations"


@contextmanager
def simulated_mode(name: str | Chip, **settings: Any) -> Iterator[Simulated]:
    """Charge all operators of this thread to a chip while the block runs; settings are those of `simulate`.

    With dry=True make the tensors on the device "meta". Raises ValueError as `simulate` does.
    """
    chip = make(name, 0, **settings)
    WHERE.install()
    WHERE.after_update.append(chip.flush)
    WHERE.new_root.append(claim_parameters)
    try:
        with _Charging(chip):
            yield chip
        chip.flush()
    finally:
        WHERE.after_update.remove(chip.flush)
        WHERE.new_root.remove(claim_parameters)
        WHERE.remove()


def enter(name: str, index: int) -> Simulated:
    """The same until the process ends: what the backend "sim" does on torch 2.9."""
    chip = make(name, index)
    attached.CHIPS[index] = chip
    WHERE.install()
    WHERE.after_update.append(chip.flush)
    WHERE.new_root.append(claim_parameters)
    _Charging(chip).__enter__()
    return chip
