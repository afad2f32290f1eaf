"""AWS's Trainium, in both generations of its software.

Native TorchNeuron (torch 2.13 and 2.14; Trn2, Trn3) registers the device "neuron" when torch is imported;
this file drives it. torch_neuronx up to 2.9 on torch_xla (Trn1, and Inf2 for inference) is in neuron_xla.py.
Names of calls and variables: the Neuron documentation, release 2.33. Nothing here has run on the hardware;
it is tested against a device that answers the documented calls.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from fmlab.backends.base import Backend
from fmlab.backends.environment import warn_if_late
from fmlab.backends.neuron_xla import NeuronThroughXLA, through_xla
from fmlab.backends.stacks import NEURON as STACK
from fmlab.backends.stacks import native_device

F = TypeVar("F")


class Neuron(Backend):
    """One process drives one logical NeuronCore, which is one core or, on Trn2 and Trn3 by default, two."""

    name = "neuron"
    distributed_backend = "neuron"
    static_shapes = True
    dynamic_compile = False  # torch.compile(dynamic=True) is rejected

    def __init__(self, index: int = 0) -> None:
        self._module: Any = torch.neuron  # type: ignore[attr-defined]
        self.device = torch.device("neuron", index)
        warn_if_late("torch_neuronx")

    @classmethod
    def is_available(cls) -> bool:
        return native_device() == "neuron" or through_xla()

    @classmethod
    def why_absent(cls) -> str:
        if problem := STACK.problem():
            return problem
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
            return "torch-neuronx is installed but not loaded: unset TORCH_DEVICE_BACKEND_AUTOLOAD"
        return (
            "torch-neuronx finds no NeuronCore on this machine: look at neuron-ls and NEURON_RT_VISIBLE_CORES"
        )

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        """The generation of the software, where both are there; by default the native one."""
        return ("native", "xla")

    @classmethod
    def create(cls, variant: str | None, index: int) -> Backend:
        native = native_device() == "neuron"
        if variant == "native" and not native:
            raise ValueError(f"native TorchNeuron is not loaded: {cls.why_absent()}")
        if variant == "xla" or not native:
            return NeuronThroughXLA(index)
        module: Any = torch.neuron  # type: ignore[attr-defined]
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            return cls(module.current_device())  # a launched rank has been given its core
        count = module.device_count()
        if index >= count:
            raise ValueError(
                f"this process wants logical NeuronCore {index}, but sees {count}: start at most "
                f"{count} ranks, or show it more (NEURON_RT_VISIBLE_CORES)"
            )
        module.set_device(index)
        return cls(index)

    def device_count(self) -> int:
        """Logical NeuronCores that this process sees: 4 to a Trn2 chip when two cores make one, else 8."""
        return int(self._module.device_count())

    def describe(self) -> str:
        properties = self._module.get_device_properties(self.device.index)
        cores = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
        logical = f"{cores} core(s) to a logical one" if cores else "logical cores as the runtime makes them"
        rounding = "stochastic" if os.environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN") == "1" else "to nearest"
        return (
            f"{properties.name} ({self.device}), {properties.total_memory / 2**30:.1f} GiB, {logical}, "
            f"rounding {rounding}"
        )

    # region order of work
    def synchronize(self) -> None:
        self._module.synchronize()

    def stream(self) -> Any:
        return self._module.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else self._module.stream(stream)

    # endregion

    # region memory
    def memory_stats(self) -> dict[str, int]:
        """Bytes of the device's allocator, which runs behind the program: this waits for the device first."""
        self.synchronize()
        return {
            "current": int(self._module.memory_allocated()),
            "peak": int(self._module.max_memory_allocated()),
            "reserved": int(self._module.memory_reserved()),
            "total": int(self._module.get_device_properties(self.device.index).total_memory),
        }

    def reset_peak_memory(self) -> None:
        self.synchronize()
        self._module.reset_peak_memory_stats()

    def memory_summary(self) -> str:
        self.synchronize()
        return str(self._module.memory_summary())

    # endregion

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._module.manual_seed_all(seed)

    def _compile(self, fn: F, settings: dict[str, Any]) -> F:
        """By the Neuron compiler, in one graph unless told otherwise; each shape has a program of its own."""
        advised: dict[str, Any] = {"backend": "neuron", "fullgraph": True, "dynamic": False}
        compile_: Any = torch.compile
        compiled: F = compile_(fn, **(advised | settings))
        return compiled


BACKEND = Neuron
