"""The collectives as functions, by a schedule of ours over send and receive.

    all_reduce(x)                                         in place, by an algorithm that fits the size
    all_reduce(x, "max", group=pair, algorithm="tree", segments=4)
    all_gather(output, x); reduce_scatter(output, x); all_to_all(output, x); broadcast(x, 0); barrier()

They take the CPU tensors that torch.distributed takes over gloo, and leave the same results (to rounding: the
order of additions is the algorithm's). All ranks get the same bits, except by "one_shot", where each adds up
in its own order. Without autograd. Every rank of the group must call with the same arguments; `checked` finds
out who does not.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmlab.collectives.algorithms import schedule
from fmlab.collectives.guard import entering
from fmlab.collectives.run import COMBINE, Blocks, Flat, execute

__all__ = ["all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce", "reduce_scatter"]

SMALL = (
    64 << 10
)  # bytes: below, the number of steps matters more than the bytes (gloo over loopback, 4 ranks)


def all_reduce(
    tensor: Tensor, op: str = "sum", group: Any = None, algorithm: str = "auto", **options: Any
) -> Tensor:
    """Combine `tensor` over the ranks of the group, in place on every rank; returns it.

    op: "sum", "avg" (the sum, then divided: large fp16 values overflow on the way), "max" or "min".
    options: segments, dims, inside, between of `schedule`.
    """
    _check(tensor, op, "tensor")
    plan = _plan("all_reduce", algorithm, tensor, group, options)
    with entering("all_reduce", group, tensor, op=op), _flat(tensor) as flat:
        execute(plan, Flat(flat, plan.chunk_sizes(flat.numel())), group, COMBINE[op])
        if op == "avg":
            flat.div_(plan.n)
    return tensor


def reduce(
    tensor: Tensor, dst: int = 0, op: str = "sum", group: Any = None, algorithm: str = "auto", **options: Any
) -> Tensor:
    """Combine `tensor` over the ranks into that of rank `dst` (of the group); others keep theirs."""
    _check(tensor, op, "tensor")
    plan = _plan("reduce", algorithm, tensor, group, {**options, "root": dst})
    mine = dist.get_rank(group) == dst
    with (
        entering("reduce", group, tensor, op=op, root=dst),
        _flat(tensor if mine else tensor.clone()) as flat,
    ):
        execute(plan, Flat(flat, plan.chunk_sizes(flat.numel())), group, COMBINE[op])
        if op == "avg":
            flat.div_(plan.n)
    return tensor


def broadcast(
    tensor: Tensor, src: int = 0, group: Any = None, algorithm: str = "auto", **options: Any
) -> Tensor:
    """Copy `tensor` of rank `src` (of the group) into that of every other rank; returns it."""
    _check(tensor, "sum", "tensor", any_type=True)
    plan = _plan("broadcast", algorithm, tensor, group, {**options, "root": src})
    with entering("broadcast", group, tensor, root=src), _flat(tensor) as flat:
        execute(plan, Flat(flat, plan.chunk_sizes(flat.numel())), group, _never)
    return tensor


def all_gather(
    output: Tensor, tensor: Tensor, group: Any = None, algorithm: str = "auto", **options: Any
) -> Tensor:
    """Fill `output` with every rank's `tensor`, by rank; output has as many elements as all of them."""
    _check(tensor, "sum", "tensor", any_type=True)
    plan = _plan("all_gather", algorithm, output, group, options)
    _check_pair("all_gather", output, tensor, output.numel(), plan.n * tensor.numel())
    with entering("all_gather", group, tensor), _flat(output) as flat:
        own = dist.get_rank(group) * tensor.numel()
        flat[own : own + tensor.numel()].copy_(tensor.reshape(-1))
        execute(plan, Flat(flat, plan.chunk_sizes(flat.numel())), group, _never)
    return output


def reduce_scatter(
    output: Tensor,
    tensor: Tensor,
    op: str = "sum",
    group: Any = None,
    algorithm: str = "auto",
    **options: Any,
) -> Tensor:
    """Combine `tensor` over the ranks; rank r keeps block r of the result in `output`. `tensor` stays."""
    _check(tensor, op, "tensor")
    plan = _plan("reduce_scatter", algorithm, tensor, group, options)
    _check_pair("reduce_scatter", output, tensor, plan.n * output.numel(), tensor.numel())
    with entering("reduce_scatter", group, tensor, op=op), _flat(output) as flat:
        work, own = tensor.reshape(-1).clone(), dist.get_rank(group) * flat.numel()
        execute(plan, Flat(work, plan.chunk_sizes(work.numel())), group, COMBINE[op])
        flat.copy_(work[own : own + flat.numel()])
        if op == "avg":
            flat.div_(plan.n)
    return output


def all_to_all(
    output: Tensor, tensor: Tensor, group: Any = None, algorithm: str = "auto", **options: Any
) -> Tensor:
    """Block d of rank s's `tensor` becomes block s of rank d's `output`."""
    _check(tensor, "sum", "tensor", any_type=True)
    plan = _plan("all_to_all", algorithm, tensor, group, options)
    _check_pair("all_to_all", output, tensor, output.numel(), tensor.numel())
    plan.chunk_sizes(tensor.numel())
    with entering("all_to_all", group, tensor), _flat(output) as flat:
        blocks = Blocks(flat, tensor.contiguous().view(-1), dist.get_rank(group), plan.n)
        execute(plan, blocks, group, _never)
    return output


def barrier(group: Any = None, algorithm: str = "auto") -> None:
    """Return on no rank before every rank of the group has called."""
    plan = schedule(
        "barrier", "dissemination" if algorithm == "auto" else algorithm, dist.get_world_size(group)
    )
    with entering("barrier", group, None):
        token = torch.zeros(plan.chunks, dtype=torch.uint8)  # there is no message without a byte
        execute(plan, Flat(token, [1] * plan.chunks), group, COMBINE["max"])


def _plan(collective: str, algorithm: str, payload: Tensor, group: Any, options: dict[str, Any]) -> Any:
    n = dist.get_world_size(group)
    if n < 1:
        raise ValueError(f"this rank does not belong to the group {group}")
    if algorithm == "auto":
        algorithm = choose(collective, payload.numel() * payload.element_size())
    return schedule(collective, algorithm, n, **options)


def choose(collective: str, payload_bytes: int) -> str:
    """What "auto" means on ranks of one machine: few steps for small payloads, few bytes for large ones.

    For networks of chips the choice is `cost.compare`'s.
    """
    if collective in ("broadcast", "reduce"):
        return "tree" if payload_bytes < SMALL else "ring"
    if collective == "all_to_all":
        return "direct"
    return "halving_doubling" if payload_bytes < SMALL else "ring"


def _check(tensor: Tensor, op: str, name: str, any_type: bool = False) -> None:
    if op not in COMBINE:
        raise ValueError(f"op={op!r}; legal: {', '.join(COMBINE)}")
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}: these collectives send piece by piece, as gloo can; NCCL would "
            "lock up. Move it to the CPU, or call torch.distributed's"
        )
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device: it has a shape and no numbers to send")
    if any_type:
        return
    eighth = tensor.is_floating_point() and tensor.element_size() == 1  # torch has no sums of fp8
    if tensor.dtype == torch.bool or tensor.is_complex() or eighth:
        raise ValueError(f"{op} of {tensor.dtype} is not defined here; use a number type")
    if op == "avg" and not tensor.is_floating_point():
        raise ValueError(f"avg needs a floating point type, not {tensor.dtype}; use sum, or convert")


def _check_pair(collective: str, output: Tensor, tensor: Tensor, a: int, b: int) -> None:
    if output.dtype != tensor.dtype:
        raise ValueError(f"{collective}: output is {output.dtype}, tensor is {tensor.dtype}; make them equal")
    if a != b:
        raise ValueError(
            f"{collective}: output has {output.numel()} elements and tensor {tensor.numel()}, "
            "which does not fit the number of ranks"
        )


class _flat:
    """The tensor as one row of elements; what is not contiguous is copied there and back."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()

    def __enter__(self) -> Tensor:
        if torch._debug_has_internal_overlap(self.tensor) == 1:
            raise ValueError(
                f"the tensor has several elements in one place (shape {tuple(self.tensor.shape)}, strides "
                f"{self.tensor.stride()}), so that no result can be put there; pass tensor.contiguous()"
            )
        self.row = self.tensor.contiguous().view(-1)
        return self.row

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None and not self.tensor.is_contiguous():
            self.tensor.copy_(self.row.view(self.tensor.shape))


def _never(own: Tensor, other: Tensor) -> None:
    raise AssertionError("nothing is added in this collective")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "barrier": barrier,
}
