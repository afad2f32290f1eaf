"""Running a kernel on the machine."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmlab.kernels.tiles.core import PARTITIONS
from fmlab.kernels.tiles.core import core as find_core
from fmlab.kernels.tiles.dma import Transfers
from fmlab.kernels.tiles.gpsimd_engine import GpSimdEngine
from fmlab.kernels.tiles.memory import History
from fmlab.kernels.tiles.report import Run, psum_banks
from fmlab.kernels.tiles.scalar_engine import ScalarEngine
from fmlab.kernels.tiles.schedule import schedule
from fmlab.kernels.tiles.tensor_engine import TensorEngine
from fmlab.kernels.tiles.tile import DTYPES, Hbm, short
from fmlab.kernels.tiles.vector_engine import VectorEngine

Kernel = Callable[..., Any]
Shape = Sequence[int] | tuple[Sequence[int], torch.dtype]


class NeuronCore(Transfers, TensorEngine, VectorEngine, ScalarEngine, GpSimdEngine):
    """What a kernel gets as its first argument: memory, transfers, and the instructions of all engines."""


def run(kernel: Kernel, *inputs: torch.Tensor, core: str = "v2", dry: bool = False, **options: Any) -> Run:
    """Run `kernel(nc, *inputs, **options)` on the machine and report.

    kernel:  a function of a NeuronCore and tensors in HBM that returns what it made with `nc.hbm`
    inputs:  torch tensors on the CPU: fp32, bf16, fp16 or int32; they are never changed
    core:    "v2" (Trainium, Inferentia2) or "v3" (Trainium2)
    dry:     shapes alone: no values, same times and bytes; whatever was never written goes unnoticed

    Raises KernelError, with the kernel's line, for what the machine cannot do; ValueError for wrong inputs.
    """
    chosen = find_core(core)
    nc = NeuronCore(chosen, dry)
    arguments = [_input(nc, i, tensor) for i, tensor in enumerate(inputs)]
    returned = kernel(nc, *arguments, **options)
    outputs = _outputs(kernel, returned, dry)
    busy = schedule(chosen, nc.program)
    seconds = max((one.end for one in nc.program), default=0.0)
    sbuf, psum = nc.memory("SBUF"), nc.memory("PSUM")
    tensors = [one.data for one in outputs]
    return Run(
        kernel=getattr(kernel, "__name__", str(kernel)),
        core=chosen,
        output=tuple(tensors) if isinstance(returned, tuple | list) else tensors[0],
        instructions=tuple(nc.program),
        seconds=seconds,
        utilisation={name: time / seconds if seconds else 0.0 for name, time in busy.items()},
        hbm_read=sum(one.nbytes for one in nc.program if one.engine == "load"),
        hbm_written=sum(one.nbytes for one in nc.program if one.engine == "store"),
        flops=sum(one.flops for one in nc.program),
        peak_sbuf=sbuf.peak * PARTITIONS,
        peak_psum=psum_banks(psum.peak),
        at_peak=tuple(f"{one.name} {one.about}: {sbuf.amount(one.size)} a partition" for one in sbuf.at_peak),
        itemsize=4 if nc.fp32_matmuls else 2,
    )


def hbm_bytes(
    kernel: Kernel,
    shapes: Sequence[Shape],
    dtype: torch.dtype = torch.bfloat16,
    core: str = "v2",
    **options: Any,
) -> int:
    """Bytes that a kernel moves between HBM and SBUF for inputs of these shapes, counted without values.

    shapes: one for each input; (shape, dtype) where an input has another dtype than `dtype`.
    """
    inputs = []
    for one in shapes:
        pair = len(one) == 2 and isinstance(one[1], torch.dtype)
        shape, kind = one if pair else (one, dtype)
        inputs.append(torch.empty(tuple(shape), dtype=kind, device="meta"))  # type: ignore[arg-type]
    return run(kernel, *inputs, core=core, dry=True, **options).hbm_bytes


def _input(nc: NeuronCore, position: int, tensor: torch.Tensor) -> Hbm:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"input {position} is {tensor!r}; inputs are tensors, options go by keyword")
    if tensor.dtype not in DTYPES:
        legal = ", ".join(map(short, DTYPES))
        raise ValueError(
            f"input {position} has dtype {tensor.dtype}, which is not supported; choose from {legal}"
        )
    if tensor.dim() < 1 or math.prod(tensor.shape) == 0:
        raise ValueError(f"input {position} has shape {tuple(tensor.shape)}; it needs dimensions above 0")
    if not nc.dry and tensor.device.type != "cpu":
        raise ValueError(f"input {position} is on {tensor.device}; the machine runs on the CPU")
    data = tensor.detach().contiguous()
    data = data.to("meta") if nc.dry else data
    return Hbm(f"input {position}", "input", data, None, History(), data.shape[-1], nc)


def _outputs(kernel: Kernel, returned: Any, dry: bool) -> list[Hbm]:
    outputs = list(returned) if isinstance(returned, tuple | list) else [returned]
    name = getattr(kernel, "__name__", "the kernel")
    for one in outputs:
        if not isinstance(one, Hbm) or one.role == "input":
            raise ValueError(
                f"{name} returned {one!r}; a kernel returns what it made with nc.hbm(shape, dtype)"
            )
        if not dry and one.mask is not None and not bool(one.mask.all()):
            missing = int((~one.mask).sum())
            raise ValueError(f"{name} returned {one}, of which {missing:,} elements were never stored")
    return outputs
