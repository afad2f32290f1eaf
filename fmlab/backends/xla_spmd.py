"""SPMD: one program for many devices, cut by the XLA compiler where tensors are marked as sharded.

The model is written for one device. Marks say which dim of a tensor lies across which axis of a mesh; the
compiler divides every operation accordingly and puts in the collectives. A whole process is in SPMD mode or
is not, so `fmlab.parallel.spmd` runs its comparisons in a process of their own.
"""

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal, Protocol

from torch import Tensor, nn

Strategy = Literal["data", "tensor", "fsdp"]
STRATEGIES = ("data", "tensor", "fsdp")
#: the dim that each kind of rule of a parallel plan divides; see fmlab.models.plan
_DIMS = {"column": 0, "row": 1, "vocab": 0, "head": 1, "expert": 0}


class Rule(Protocol):
    """What is needed of a rule of a parallel plan."""

    @property
    def kind(self) -> str: ...


class Plan(Protocol):
    """What is needed of a parallel plan."""

    def rule(self, name: str) -> Rule: ...


def start() -> None:
    """Put this process into SPMD mode, before anything is on the device; there is no way back."""
    import_module("torch_xla.runtime").use_spmd()


def mesh(**axes: int) -> Any:
    """A mesh of this process's devices, in SPMD mode from here on: mesh(data=2, model=4).

    Raises ValueError unless the axes multiply to the number of devices.
    """
    import numpy as np

    runtime, spmd = import_module("torch_xla.runtime"), import_module("torch_xla.distributed.spmd")
    start()
    devices = runtime.global_runtime_device_count()
    if not axes or math.prod(axes.values()) != devices:
        raise ValueError(
            f"a mesh of {dict(axes)} is for {math.prod(axes.values())} devices, and there are {devices}; for "
            "virtual devices: fmlab.backends.xla_environment.configure('CPU', devices=…) before anything else"
        )
    return spmd.Mesh(np.arange(devices), tuple(axes.values()), tuple(axes))


def spec_of(plan: Plan, name: str, shape: tuple[int, ...], axis: str = "model") -> tuple[str | None, ...]:
    """The partition of a parameter over `axis`, from its rule in the model's own plan.

    A fused matrix (parts > 1) is cut straight through: XLA has no word for a cut of each part, so the
    compiler moves pieces when the parts are taken apart.
    """
    divided = _DIMS.get(plan.rule(name).kind)
    return tuple(axis if dim == divided else None for dim in range(len(shape)))


def fully_sharded(shape: tuple[int, ...], size: int, axis: str = "data") -> tuple[str | None, ...]:
    """The partition of a parameter over `size` devices: its longest dim, if that divides; else whole."""
    longest = max(range(len(shape)), key=lambda dim: shape[dim], default=None)
    if longest is None or shape[longest] % size:
        return (None,) * len(shape)
    return tuple(axis if dim == longest else None for dim in range(len(shape)))


def mark(tensor: Tensor, on: Any, partition: tuple[str | None, ...]) -> Tensor:
    """Mark a tensor of the device in place; returns it."""
    import_module("torch_xla.distributed.spmd").mark_sharding(tensor, on, partition)
    return tensor


def shard_model(model: nn.Module, strategy: Strategy, on: Any, plan: Plan | None = None) -> None:
    """Mark the parameters of a model that is on the device.

    data:   nothing; every device holds all
    tensor: by the model's plan, over the axis "model"
    fsdp:   each over the axis "data", and the stream between blocks by its rows, so that weights are gathered
            and activations are not

    Raises ValueError for another strategy, a missing plan, and a mesh without the axis.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r}: legal are {', '.join(STRATEGIES)}")
    sizes = dict(zip(on.axis_names, on.mesh_shape, strict=True))
    axis = "model" if strategy == "tensor" else "data"
    if axis not in sizes:
        raise ValueError(f"strategy {strategy!r} needs a mesh with the axis {axis!r}, got {', '.join(sizes)}")
    if strategy == "tensor" and plan is None:
        raise ValueError("strategy 'tensor' needs the model's parallel plan: model.parallel_plan()")
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if strategy == "tensor":
            assert plan is not None
            mark(parameter, on, spec_of(plan, name, shape))
        elif strategy == "fsdp":
            mark(parameter, on, fully_sharded(shape, sizes["data"]))
    if strategy == "fsdp":
        for block in getattr(model, "blocks", ()):
            block.register_forward_hook(_rows_stay(on))


def _rows_stay(on: Any) -> Any:
    def hook(block: nn.Module, args: Any, state: Any) -> None:
        if "hidden" in state:
            mark(state.hidden, on, ("data", None, None))

    return hook


def shard_batch(batch: Mapping[str, Tensor], on: Any) -> dict[str, Tensor]:
    """The batch on the device, its rows divided over the axis "data" if the mesh has it."""
    xla = import_module("torch_xla")
    axis = "data" if "data" in on.axis_names else None
    moved = {name: tensor.to(xla.device()) for name, tensor in batch.items()}
    for tensor in moved.values():
        mark(tensor, on, (axis, *[None] * (tensor.dim() - 1)))
    return moved
