"""Payload of collectives, counted where PyTorch hands them to the process group.

Every collective passes through PyTorch's dispatcher as an operator, whoever called it: `dist.all_reduce`,
functional collectives, DTensor, or the C++ reducer inside DistributedDataParallel. A dispatch mode sees them
all. It sees calls of its own thread (and of the backward pass that this thread runs), not of other threads.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operator -> (name of the collective, which arguments hold its payload).
# The payload is the whole logical tensor, as in nccl-tests: what a gather puts together, what a
# reduce-scatter takes in. Argument 0 is the output in c10d, the input in functional collectives.
C10D_OPS: dict[str, tuple[str, Any]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", None),
}
FUNCTIONAL_OPS: dict[str, tuple[str, Any]] = {
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", "result"),
    "all_gather_into_tensor_out": ("all_gather", "result"),
    "all_gather_into_tensor_coalesced": ("all_gather", "result"),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
}


@dataclass(frozen=True)
class Collective:
    """One collective as this rank issued it.

    `bytes` is the payload: the whole tensor that is reduced, gathered, scattered or sent. `ranks` are the
    global ranks of its group. `seconds` is when it was issued (time.perf_counter).
    """

    op: str
    bytes: int
    ranks: tuple[int, ...]
    dtype: str
    seconds: float


@dataclass
class Traffic:
    """The collectives of a region, in the order in which they were issued."""

    calls: list[Collective] = field(default_factory=list)

    def bytes(
        self, op: str | None = None, ranks: Sequence[int] | None = None, dtype: str | None = None
    ) -> int:
        """Payload bytes of the calls that match: by collective, by group, by element type ("float32")."""
        return sum(call.bytes for call in self._matching(op, ranks, dtype))

    def count(
        self, op: str | None = None, ranks: Sequence[int] | None = None, dtype: str | None = None
    ) -> int:
        """How many calls match."""
        return sum(1 for _ in self._matching(op, ranks, dtype))

    def by_op(self) -> dict[str, tuple[int, int]]:
        """Collective -> (calls, payload bytes)."""
        number, total = Counter[str](), Counter[str]()
        for call in self.calls:
            number[call.op] += 1
            total[call.op] += call.bytes
        return {op: (number[op], total[op]) for op in number}

    def _matching(
        self, op: str | None, ranks: Sequence[int] | None, dtype: str | None
    ) -> Iterator[Collective]:
        for call in self.calls:
            if op not in (None, call.op) or dtype not in (None, call.dtype):
                continue
            if ranks is None or tuple(ranks) == call.ranks:
                yield call

    def __str__(self) -> str:
        lines = [f"{'collective':<16}{'calls':>7}{'payload bytes':>16}"]
        lines += [f"{op:<16}{calls:>7}{size:>16,}" for op, (calls, size) in self.by_op().items()]
        return "\n".join(lines)


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the collectives that this thread issues inside the block.

    Point-to-point messages count on both sides: as "send" at the sender and "recv" at the receiver.
    """
    record = Traffic()
    with _Watch(record):
        yield record


class _Watch(TorchDispatchMode):
    def __init__(self, record: Traffic) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace = func.namespace
        if namespace == "c10d":
            self._note(C10D_OPS, func, args, None)
        result = func(*args, **(kwargs or {}))
        if namespace == "_c10d_functional":
            self._note(FUNCTIONAL_OPS, func, args, result)
        return result

    def _note(self, table: dict[str, Any], func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.split("::")[1]
        if name not in table:
            return  # wait_tensor, monitored_barrier and other operators without a payload
        op, where = table[name]
        payload = result if where == "result" else [] if where is None else args[where]
        tensors = list(tensors_of(payload)) or list(tensors_of(args))[:1] * (where is not None)
        self.record.calls.append(
            Collective(
                op=op,
                bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                ranks=group_ranks(func, args),
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                seconds=time.perf_counter(),
            )
        )


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def group_ranks(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The global ranks of the group that an operator runs in, whichever way it names the group."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
        if argument.name == "group_name":
            group = dist.distributed_c10d._resolve_process_group(value)
            return tuple(dist.get_process_group_ranks(group))
    return ()
