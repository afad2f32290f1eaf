"""Google's TPUs: TorchTPU where it is loaded (the device "tpu"), torch_xla elsewhere (the device "xla").

TorchTPU registers itself when torch is imported on a machine with TPUs. Its device calls belong to
`torch.accelerator`: from torch 2.11 on it raises when a program calls `torch.tpu.synchronize` and the like.
It counts no memory publicly, and orders work by its data, so that streams are of no use.
"""

import os

import torch

from fmlab.backends.base import Backend, MatmulPrecision
from fmlab.backends.environment import warn_if_late
from fmlab.backends.stacks import TPU as STACK
from fmlab.backends.stacks import native_device
from fmlab.backends.xla import XLA
from fmlab.backends.xla_environment import guess_device

#: devices of one chip, where it is not one: a v7 chip is two devices with half of its memory each
#: (torch-tpu 0.2.0, _internal/utils/hardware.py)
DEVICES_PER_CHIP = {"v7": 2, "tpu7x": 2}


class TPU(Backend):
    """One process drives one TPU device, which it sees as the only one where ranks were started for each."""

    name = "tpu"
    distributed_backend = "tpu_dist"
    static_shapes = True  # torch_tpu compiles with dynamic=False unless told otherwise

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("tpu", index)
        warn_if_late("torch_tpu")

    @classmethod
    def is_available(cls) -> bool:
        return native_device() == "tpu" or _through_xla()

    @classmethod
    def why_absent(cls) -> str:
        if STACK.version() is None:
            return STACK.problem()
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
            return "torch-tpu is installed but not loaded: unset TORCH_DEVICE_BACKEND_AUTOLOAD"
        return "torch-tpu is installed but finds no TPU on this machine"

    @classmethod
    def create(cls, variant: str | None, index: int) -> Backend:
        if native_device() != "tpu":
            return TPUThroughXLA(index)
        current = torch.accelerator.current_device_index()
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            return cls(current)  # every rank sees its own device as the first
        if index != current:
            raise ValueError(
                f"this process is bound to TPU device {current} and cannot take number {index}: start one "
                "process for each device (python -m torch.tpu.distributed, or torch.tpu.distributed."
                "set_tpu_launch_env() before torchrun)"
            )
        return cls(index)

    def device_count(self) -> int:
        """Devices that this process sees: one where each rank was given its own."""
        return torch.accelerator.device_count()

    def describe(self) -> str:
        name = torch.tpu.get_device_name()  # type: ignore[attr-defined]
        per_chip = devices_per_chip(name)
        part = "one chip" if per_chip == 1 else f"1/{per_chip} of a chip"
        return (
            f"{name} ({self.device}, {part}); float32 matmul precision {torch.get_float32_matmul_precision()}"
        )

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def memory_stats(self) -> dict[str, int]:
        """Only "total": TorchTPU shows no public counter of what is in use."""
        properties = torch.tpu.get_device_properties(self.device.index)  # type: ignore[attr-defined]
        return {"total": int(properties.total_memory)}

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.tpu.manual_seed_all(seed)  # type: ignore[attr-defined]

    def set_matmul_precision(self, level: MatmulPrecision) -> None:
        """ "medium" is one bf16 pass, TorchTPU's DEFAULT; "high" and "highest" are several."""
        torch.set_float32_matmul_precision(level)


def devices_per_chip(name: str) -> int:
    """How many devices one chip of this name is: two for TPU v7, one for others."""
    lower = name.lower()
    return next((number for key, number in DEVICES_PER_CHIP.items() if key in lower), 1)


class TPUThroughXLA(XLA):
    """A TPU that torch_xla drives; the tensors' device is called "xla"."""

    name = "tpu"


def _through_xla() -> bool:
    """Whether torch_xla drives TPUs here. It is loaded to see only where a TPU is at hand or asked for."""
    wanted = os.environ.get("PJRT_DEVICE") or guess_device()
    return wanted.upper() == "TPU" and XLA.is_available()


BACKEND = TPU
