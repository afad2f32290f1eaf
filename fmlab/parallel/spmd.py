"""Does a sharded program compute what one device computes, and which collectives did the compiler put in?

    reports = spmd_parity(model_fn, batch, {"data": {"data": 8}, "tensor": {"data": 2, "model": 4}})

runs in a process of its own, whose CPU pretends to be eight devices: see fmlab.backends.xla_spmd.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from fmlab.backends import get_backend, xla_environment, xla_program, xla_spmd
from fmlab.backends.xla import XLA
from fmlab.objectives import total_loss
from fmlab.objectives.choice import objective_of
from fmlab.parallel.layout import Batch

MOST_SHOWN = 2000  # characters of what a failed process said


@dataclass(frozen=True)
class SPMDReport:
    """One strategy beside one device.

    loss, reference:  the mean loss of the batch, sharded and on one device
    worst:            the largest ‖difference‖ / ‖gradient‖ of all parameters, and its name
    collectives:      how many of each stand in the compiled program
    sharded:          parameters that lie across devices, of all
    compile_seconds:  with the forward and backward pass once
    """

    strategy: str
    mesh: Mapping[str, int]
    loss: float
    reference: float
    worst: float
    worst_name: str
    collectives: Mapping[str, int]
    sharded: tuple[int, int]
    compile_seconds: float


def spmd_parity(
    model_fn: Callable[[], nn.Module],
    batch: Batch,
    strategies: Mapping[str, Mapping[str, int]],
    timeout: float = 240.0,
) -> dict[str, SPMDReport]:
    """Compare loss and every gradient of sharded programs with one device, in a process of its own.

    model_fn:   builds the model; it is called after the same seed each time
    strategies: "data", "tensor" or "fsdp" -> its mesh; all meshes need the same number of devices

    Raises ValueError for a strategy or mesh that is not legal and where there is no torch_xla, RuntimeError
    with what the process said when it fails, TimeoutError when it is slow.
    """
    sizes = {name: _devices(axes) for name, axes in strategies.items()}
    if unknown := set(strategies) - set(xla_spmd.STRATEGIES):
        raise ValueError(f"strategy {unknown.pop()!r}: legal are {', '.join(xla_spmd.STRATEGIES)}")
    if len(set(sizes.values())) != 1:
        raise ValueError(f"all meshes need the same number of devices, got {sizes}")
    if find_spec("torch_xla") is None:
        raise ValueError(XLA.why_absent())
    with tempfile.TemporaryDirectory() as folder:
        job, answer = Path(folder) / "job", Path(folder) / "answer"
        job.write_bytes(cloudpickle.dumps((model_fn, dict(batch), dict(strategies))))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS"):
            env.pop(name, None)
        run = "import sys; from fmlab.parallel.spmd import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", run, str(job), str(answer)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the sharded programs took more than {timeout:.0f} s") from None
        if done.returncode != 0:
            how = f"ended with code {done.returncode}"
            raise RuntimeError(f"the process for {sizes} {how}:\n{done.stderr[-MOST_SHOWN:]}")
        reports: dict[str, SPMDReport] = pickle.loads(answer.read_bytes())
    return reports


def _devices(axes: Mapping[str, int]) -> int:
    product = 1
    for size in axes.values():
        product *= size
    return product


def _compare(
    model_fn: Callable[[], nn.Module], batch: Batch, name: Any, axes: Mapping[str, int]
) -> SPMDReport:
    reference, gradients = _on_host(model_fn, batch)
    mesh = xla_spmd.mesh(**axes)
    backend = get_backend("xla")
    model = backend.to_device(_build(model_fn))
    xla_spmd.shard_model(model, name, mesh, _plan(model))
    began = time.perf_counter()
    with xla_program.capture() as program:
        loss = _mean_loss(model, xla_spmd.shard_batch(batch, mesh), batch)
        loss.backward()
    seconds = time.perf_counter() - began
    errors = {
        key: float((p.grad.cpu() - gradients[key]).norm() / gradients[key].norm().clamp(min=1e-12))
        for key, p in model.named_parameters()
        if p.grad is not None
    }
    worst = max(errors, key=lambda key: errors[key])
    collectives: dict[str, int] = {}
    for hlo in program.after:
        for kind, number in hlo.collectives.items():
            collectives[kind] = collectives.get(kind, 0) + number
    sharded = (_sharded(model), len(list(model.parameters())))
    loss_value = float(loss.detach().cpu())
    return SPMDReport(
        name, dict(axes), loss_value, reference, errors[worst], worst, collectives, sharded, seconds
    )


def _build(model_fn: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model_fn()


def _on_host(model_fn: Callable[[], nn.Module], batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    model = _build(model_fn)
    loss = _mean_loss(model, batch, batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _mean_loss(model: nn.Module, batch: Batch, on_host: Batch) -> torch.Tensor:
    """Counts are taken from the labels on the host: the device would have to be asked for them."""
    objective: Any = objective_of(model)
    counts = {name: int(count) for name, count in objective.counts(on_host).items()}
    return total_loss(objective(model, batch), counts)


def _plan(model: nn.Module) -> Any:
    declared: Any = getattr(model, "parallel_plan", None)
    return declared() if declared is not None else None


def _sharded(model: nn.Module) -> int:
    xla = import_module("torch_xla")
    specs = [xla._XLAC._get_xla_sharding_spec(p) for p in model.parameters()]
    return sum("devices=" in spec for spec in specs)


def main(argv: list[str]) -> int:
    """In the process with many devices: read the job, write the reports."""
    model_fn, batch, strategies = pickle.loads(Path(argv[0]).read_bytes())
    devices = _devices(next(iter(strategies.values())))
    xla_environment.configure("CPU", devices=devices, fast_compile=True, capture=True)
    xla_spmd.start()
    get_backend("xla")  # before the first backward pass
    reports = {name: _compare(model_fn, batch, name, axes) for name, axes in strategies.items()}
    Path(argv[1]).write_bytes(pickle.dumps(reports))
    return 0
