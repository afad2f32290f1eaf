"""The first generation of AWS's software: torch_neuronx up to 2.9 on torch_xla, for Trn1 and Inf2.

Its training support ended with Neuron 2.30; Trn1 runs on an older pinned release, Inf2 serves models that
were compiled ahead (`trace`). What torch_xla does is in xla.py; this is what Neuron adds.
"""

import os
import shutil
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import nn

from fmlab.backends.environment import warn_if_late
from fmlab.backends.stacks import NEURON as STACK
from fmlab.backends.xla import XLA
from fmlab.backends.xla_environment import guess_device


class NeuronThroughXLA(XLA):
    """One process drives one NeuronCore; the tensors' device is called "xla"."""

    name = "neuron"

    def __init__(self, index: int = 0) -> None:
        import_module("torch_neuronx")  # registers the device with torch_xla
        super().__init__(index)
        warn_if_late("torch_neuronx")

    def trace(self, model: nn.Module, example: Any, **options: Any) -> Any:
        """`model` compiled ahead for inputs of the shapes of `example`, for inference; called like the model.

        Other shapes raise when called. options: of `torch_neuronx.trace`.
        """
        return import_module("torch_neuronx").trace(model.eval(), example, **options)


def through_xla() -> bool:
    """Whether torch_xla drives NeuronCores here. It is loaded only where one is at hand or asked for."""
    wanted = os.environ.get("PJRT_DEVICE") or guess_device()
    return wanted.upper() == "NEURON" and STACK.version() is not None and XLA.is_available()


def is_extracting() -> bool:
    """Whether this run only collects graphs for neuron_parallel_compile: its numbers are zeros, so that a
    loss must not be judged, and a few steps are enough.
    """
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1"


def parallel_compile_command(
    command: Sequence[str], steps: int = 3, steps_option: str = "--steps"
) -> list[str]:
    """The command that compiles all graphs of `command` in parallel, before it runs for real.

    The tool runs the whole job with empty programs to see its graphs, as many steps as the job has; so the
    job's own option is set to `steps`: enough for its first, its usual and its accumulating step.
    Raises ValueError when the tool is not installed or steps is less than 2 (optimizer states appear in the
    second step, which is another graph).
    """
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}: the second step is another graph")
    if shutil.which("neuron_parallel_compile") is None:
        raise ValueError(f"neuron_parallel_compile is not here; {STACK.how}")
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word == steps_option:
            next(words, None)
        elif not word.startswith(f"{steps_option}="):
            kept.append(word)
    return ["neuron_parallel_compile", *kept, steps_option, str(steps)]
