"""What Neuron's runtime and compiler read from the environment, and what a compiled program is kept by.

A program compiled yesterday is used today only if everything it was compiled from is the same: the graph, the
shapes, the compiler's version and flags, the size of a logical core. Which of them differs nobody says, and
the job compiles for an hour again. `ProgramKey.differs` says it.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any

from torch import Tensor

from fmlab.backends.environment import set_early

LIBRARY = "torch_neuronx"


def configure(
    visible_cores: str | None = None,
    logical_core: int | None = None,
    stochastic_rounding: bool | None = None,
    rounding_seed: int | None = None,
) -> None:
    """Set up the runtime, before torch (which loads native TorchNeuron) or torch_neuronx is imported.

    visible_cores:       "0-3" or "0,2": the logical cores of this process
    logical_core:        1 or 2 cores make one logical core (Trn2, Trn3; the default there is 2)
    stochastic_rounding: round to bf16 up or down at random in proportion, so that small updates of bf16
                         weights are not lost; results change from run to run unless rounding_seed is given

    Raises ValueError for other values; warns where it comes too late.
    """
    if logical_core not in (None, 1, 2):
        raise ValueError(f"logical_core={logical_core}: legal are 1 and 2 cores")
    if rounding_seed is not None and not stochastic_rounding:
        raise ValueError("rounding_seed does nothing without stochastic_rounding=True")
    wanted = {
        "NEURON_RT_VISIBLE_CORES": visible_cores,
        "NEURON_LOGICAL_NC_CONFIG": logical_core,
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": None if stochastic_rounding is None else int(stochastic_rounding),
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": rounding_seed,
    }
    for name, value in wanted.items():
        if value is not None:
            set_early(LIBRARY, name, str(value))


@dataclass(frozen=True)
class ProgramKey:
    """What a compiled program is kept by."""

    graph: str
    shapes: tuple[str, ...]
    compiler: str
    flags: tuple[str, ...]
    logical_core: str
    cache: str

    @classmethod
    def of(
        cls, graph: str, inputs: Iterable[Tensor], environment: Mapping[str, str] = os.environ
    ) -> "ProgramKey":
        """The key of this process's environment. graph: any text that stands for the operators."""
        flags = sorted(environment.get("NEURON_CC_FLAGS", "").split())
        return cls(
            graph,
            tuple(shape_of(tensor) for tensor in inputs),
            _compiler_version(),
            tuple(flag for flag in flags if not flag.startswith("--cache_dir")),
            environment.get("NEURON_LOGICAL_NC_CONFIG", "default"),
            _cache(environment, flags),
        )

    def differs(self, other: "ProgramKey") -> dict[str, tuple[Any, Any]]:
        """Which parts differ, name -> (here, there). Empty: the program of one is found by the other."""
        names = [field.name for field in fields(self)]
        return {
            n: (getattr(self, n), getattr(other, n)) for n in names if getattr(self, n) != getattr(other, n)
        }


def shape_of(tensor: Tensor) -> str:
    """ "int64[8,512]": what a static-shape compiler tells apart."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def _cache(environment: Mapping[str, str], flags: Iterable[str]) -> str:
    """Where compiled programs are kept: by an option, by a variable, or torch_neuronx's default."""
    of_flags = [flag.split("=", 1)[1] for flag in flags if flag.startswith("--cache_dir=")]
    names = ("TORCH_NEURONX_NEFF_CACHE_DIR", "NEURON_COMPILE_CACHE_URL")
    named = [environment[name] for name in names if name in environment]
    return [*of_flags, *named, "/var/tmp/neuron-compile-cache"][0]


def _compiler_version() -> str:
    try:
        return metadata.version("neuronx-cc")
    except metadata.PackageNotFoundError:
        return "not installed"
