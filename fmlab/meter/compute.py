"""Floating point operations, by PyTorch's registry of FLOP formulas."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.utils.flop_counter import FlopCounterMode


@dataclass
class Flops:
    """Floating point operations of a block: a multiply and an add are two. Filled when the block ends.

    Only matrix multiplications, convolutions and attention are counted, as is usual for model FLOPs. Fused
    attention counts every pair of positions, masked or not ("full attention" convention). Keys of `by_module`
    are module paths that begin with the class name of the outermost module.
    """

    total: int = 0
    by_op: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, dict[str, int]] = field(default_factory=dict)


@contextmanager
def flops() -> Iterator[Flops]:
    """Count the FLOPs that run in the block, forward and backward alike."""
    record = Flops()
    with FlopCounterMode(display=False) as counter:
        yield record
    counts = {
        module: {str(op): count for op, count in ops.items()}
        for module, ops in counter.get_flop_counts().items()
    }
    record.total = counter.get_total_flops()
    record.by_op = counts.pop("Global", {})
    record.by_module = counts
