"""Floating point operations, by PyTorch's registry of FLOP formulas."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)


@dataclass
class Flops:
    """Floating point operations of a block: a multiply and an add are two. Filled when the block ends.

    Only matrix multiplications, convolutions and attention are counted, as is usual for model FLOPs. Fused
    attention counts every pair of positions, masked or not ("full attention" convention), and what it
    executes: two products forward, five backward, because it computes the scores a second time instead of
    keeping them (the usual model FLOPs count four backward). Keys of `by_module` are module paths that begin
    with the class name of the outermost module.
    """

    total: int = 0
    by_op: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, dict[str, int]] = field(default_factory=dict)


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _cpu_attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, key, value))


# torch's registry knows the fused attention of GPUs, not that of CPUs, which would count as nothing.
_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


def flop_formula(operator: Any) -> tuple[Callable[..., int] | None, Callable[..., int] | None]:
    """The formula of an operator (a packet such as torch.ops.aten.mm): one that is called with the shapes of
    its tensor arguments and out_shape, or one that is called with the tensors and out_val; the other is None.

    Both are None for an operator that torch counts as no floating point work.
    """
    if operator in _FORMULAS:
        return _FORMULAS[operator], None
    formula: Any = flop_registry.get(operator)
    # What torch's decorator put around it turns tensors into shapes, at ten times the cost.
    by_shape: Any = getattr(formula, "__wrapped__", None)
    return by_shape, (formula if by_shape is None else None)


@contextmanager
def flops() -> Iterator[Flops]:
    """Count the FLOPs that run in the block, forward and backward alike."""
    record = Flops()
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
        yield record
    counts = {
        module: {str(op): count for op, count in ops.items()}
        for module, ops in counter.get_flop_counts().items()
    }
    record.total = counter.get_total_flops()
    record.by_op = counts.pop("Global", {})
    record.by_module = counts
