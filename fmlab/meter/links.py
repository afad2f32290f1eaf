"""Bytes that a rank sends to each other rank, counted where PyTorch hands messages to the process group."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class LinkTraffic:
    """What this rank sent, by link: (own global rank, receiver's) -> bytes, and -> messages.

    Point-to-point messages only: what a library's collective sends on its own is not seen here (`wire` sees
    its bytes, though not for whom).
    """

    bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    messages: Counter[tuple[int, int]] = field(default_factory=Counter)

    @staticmethod
    def merged(sides: "list[Mapping[tuple[int, int], int]]") -> dict[tuple[int, int], int]:
        """The counts of all ranks together: every link is counted by its sender."""
        total: Counter[tuple[int, int]] = Counter()
        for side in sides:
            total.update(side)
        return dict(sorted(total.items()))


@contextmanager
def link_traffic() -> Iterator[LinkTraffic]:
    """Count the messages that this thread sends inside the block (isend, send, batch_isend_irecv)."""
    record = LinkTraffic()
    with _Watch(record):
        yield record


class _Watch(TorchDispatchMode):
    def __init__(self, record: LinkTraffic) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and func._schema.name == "c10d::send":
            tensors, group, destination = args[:3]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            link = (dist.get_rank(), ranks[destination])
            self.record.bytes[link] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.record.messages[link] += 1
        return func(*args, **(kwargs or {}))
