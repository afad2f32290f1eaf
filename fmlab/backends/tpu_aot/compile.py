"""Compiling a traced step for a TPU, and what its compiler says about memory."""

import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from fmlab.backends.tpu_aot.lowering import load_jax, lowered
from fmlab.backends.tpu_aot.trace import TracedStep

#: the smallest topologies that libtpu 0.0.52 compiles for; larger ones work alike ("v5e:16x16")
TARGETS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")
LICENCE = (
    "libtpu is not free software: its licence is the Google Cloud Platform Terms of Service (the package's "
    "metadata, and the file LICENSE in its folder)"
)


class TPUOutOfMemoryError(RuntimeError):
    """The TPU's compiler refuses the program: it does not fit in the chip's memory. The words are its own."""


@dataclass(frozen=True)
class CompiledStep:
    """What the compiler said of a step on one TPU device. Bytes; nothing here was measured on a TPU.

    arguments: weights, optimizer state and batch     outputs: loss and new state
    aliased:   outputs that overwrite arguments       temporaries: everything in between
    code:      the program itself                     seconds: of compiling, on this machine
    """

    target: str
    device: str
    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    operators: int
    versions: str

    @property
    def hbm_bytes(self) -> int:
        """What the program takes of the chip's memory at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    def __str__(self) -> str:
        parts = {"state and batch": self.arguments, "temporaries": self.temporaries, "code": self.code}
        shown = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts.items())
        return (
            f"{self.device} ({self.target}): {self.hbm_bytes / 2**20:,.1f} MiB of HBM ({shown}), "
            f"compiled in {self.seconds:.0f} s by {self.versions}"
        )


def compile_for(step: TracedStep, target: str, *, accept_libtpu_licence: bool = False) -> CompiledStep:
    """Compile `step` for one device of `target` ("v5e:2x2": generation and topology of the slice).

    accept_libtpu_licence: you have read libtpu's licence and accept it; without it nothing is loaded.
    Raises ValueError without that, or for a target that libtpu does not know; ImportError without the extra
    `tpu-aot`; TPUOutOfMemoryError, with the compiler's report, for a step that does not fit.
    """
    check_licence(accept_libtpu_licence)
    jax = load_jax()
    device = _device(target)
    function = lowered(step.graph)
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [
        jax.ShapeDtypeStruct(tuple(tensor.shape), _jax_dtype(jax, tensor.dtype), sharding=sharding)
        for tensor in step.inputs
    ]
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*int64.*truncated")  # JAX counts in 32 bits
        lowering = jax.jit(function, donate_argnums=tuple(range(step.state)), keep_unused=True).lower(*shapes)
    try:
        compiled = lowering.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TPUOutOfMemoryError(str(error)) from error
        raise
    memory = compiled.memory_analysis()
    return CompiledStep(
        target,
        device.device_kind,
        time.perf_counter() - start,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        step.operators,
        versions(),
    )


def check_licence(accepted: bool) -> None:
    """Raise ValueError that says which licence it is and where, unless it is accepted."""
    if not accepted:
        raise ValueError(
            f"{LICENCE}; read it, then say accept_libtpu_licence=True (or --accept-libtpu-licence)"
        )


def versions() -> str:
    """The versions that a result belongs to."""
    names = ("torch", "jax", "libtpu", "torchax")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def _device(target: str) -> Any:
    """The first device of the topology."""
    from jax.experimental import topologies  # after load_jax has set the environment

    try:
        return topologies.get_topology_desc(target, "tpu").devices[0]
    except Exception as error:  # libtpu's own error types
        raise ValueError(
            f"libtpu {metadata.version('libtpu')} does not compile for {target!r} ({error}); legal are, for "
            f"example, {', '.join(TARGETS)}, and larger topologies of the same generations"
        ) from error


def _jax_dtype(jax: Any, dtype: torch.dtype) -> Any:
    """JAX's name for a torch dtype; integers of 64 bits become 32, as JAX does on TPUs."""
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    name = str(narrow.get(dtype, dtype)).removeprefix("torch.")
    return jax.numpy.dtype({"bool": "bool_"}.get(name, name))
