"""Compiling a training step for real TPUs on a machine that has none.

Google publishes the TPU compiler, libtpu, as a package. It compiles for any TPU ahead of time, says how much
of the chip's memory the program takes, and refuses one that does not fit, in the same words as on a TPU. No
number of the step itself is computed that way, and no time is known.

    step = trace_step(model, batch, loss)                       # torch writes the whole step down as a graph
    compiled = compile_for(step, "v5e:2x2", accept_libtpu_licence=True)
    print(compiled)

The way there: torch traces forward, backward and the update of the weights into one graph of ATen operators
(`trace`); torchax's table says each operator in JAX, which hands XLA's program to libtpu (`lowering`). Only
torchax's table is used, not its modules: those break weight ties, while the graph takes each weight once.

It needs the extra `tpu-aot` and an environment of its own: importing torchax takes the one name that torch
has for a further device.
"""

from fmlab.backends.tpu_aot.compile import TARGETS, CompiledStep, TPUOutOfMemoryError, compile_for
from fmlab.backends.tpu_aot.results import results
from fmlab.backends.tpu_aot.trace import TracedStep, trace_step

__all__ = [
    "TARGETS",
    "CompiledStep",
    "TPUOutOfMemoryError",
    "TracedStep",
    "compile_for",
    "results",
    "trace_step",
]
