"""What an operator costs: floating point operations, and bytes of memory traffic.

FLOPs come from torch's registry (matrix products, convolutions, attention); all else counts none, because it
is limited by memory. Bytes are those of all inputs and outputs, each once:

    views and `empty`           nothing
    an expanded tensor          the elements that differ
    in-place                    the target is read and written; `copy_`, `fill_` and out= only write it
    embedding, gather, index    the rows that are touched, and the indices; not the table
    index_put_, scatter_add_    likewise, the target's rows read and written
    nll_loss                    one number of each row
    optimizers                  the gradients are read, all else read and written

What stays in caches between operators, and what a kernel moves more than that, is not counted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmlab.sim.plan import Plan, aten


class Cost(NamedTuple):
    """flops; read, written: bytes; dtype: of the operands, as torch spells it, "" without FLOPs."""

    flops: int
    read: int
    written: int
    dtype: str

    @property
    def bytes(self) -> int:
        """Memory traffic."""
        return self.read + self.written


FREE = Cost(0, 0, 0, "")
_NAMES: dict[torch.dtype, str] = {}


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that differ in place: a dimension that was expanded counts once."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= size
    return count


def cost_of(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor], outputs: Any
) -> Cost:
    """The cost of an operator that ran.

    args, kwargs: raw, as it was called; inputs: all tensors among them; outputs: what it returned.
    """
    if plan.free:
        return FREE
    traffic = _TRAFFIC.get(plan.packet)
    read, written = (traffic or _default)(plan, args, kwargs, inputs, outputs)
    flops = 0
    if plan.flops is not None:
        flops = int(plan.flops(*map(_shape, args), **kwargs, out_shape=_shapes(outputs)))
    elif plan.flops_raw is not None:
        flops = int(plan.flops_raw(*args, **kwargs, out_val=outputs))
    return Cost(flops, read, written, _dtype(inputs) if flops else "")


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value


def _shapes(value: Any) -> Any:
    return tuple(map(_shape, value)) if isinstance(value, tuple | list) else _shape(value)


def _dtype(inputs: list[Tensor]) -> str:
    for tensor in inputs:
        if tensor.is_floating_point() or tensor.is_complex():
            return dtype_name(tensor.dtype)
    return dtype_name(inputs[0].dtype) if inputs else ""


def dtype_name(dtype: torch.dtype) -> str:
    """As torch spells it, without "torch."."""
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value or in a list or tuple of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


# --- traffic --------------------------------------------------------------------------------------


def _default(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor], outputs: Any
) -> tuple[int, int]:
    """Each input read once, each output written once; what is written in place is read too, unless it is
    only overwritten."""
    targets = _targets(plan, args, kwargs)
    written = sum(map(touched_bytes, targets))
    skip = {id(tensor) for tensor in targets} if targets and not plan.reads_target else set()
    read, seen = 0, skip
    for tensor in inputs:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            read += touched_bytes(tensor)
    if isinstance(outputs, Tensor):
        if plan.returns[0] is None:
            written += touched_bytes(outputs)
    elif isinstance(outputs, list | tuple):
        for position, value in zip(_positions(plan, outputs), outputs, strict=True):
            if position is None:
                written += sum(map(touched_bytes, tensors_in(value)))
    return read, written


def _positions(plan: Plan, outputs: Sequence[Any]) -> Sequence[Any]:
    if len(plan.returns) == len(outputs):
        return plan.returns
    return [plan.returns[0] if plan.returns else None] * len(outputs)  # one list of any length


def _targets(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for position, name in plan.mutates:
        found += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return found


def _rows_read(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor], outputs: Any
) -> tuple[int, int]:
    """embedding, gather, …: as much of the table as comes out, and the indices."""
    out = touched_bytes(outputs)
    return out + sum(touched_bytes(tensor) for tensor in inputs if tensor is not args[0]), out


def _rows_written(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor], outputs: Any
) -> tuple[int, int]:
    """index_put_, scatter_add_, …: values and indices are read, the rows they touch read and written."""
    others = [tensor for tensor in inputs if tensor is not args[0]]
    read = sum(map(touched_bytes, others))
    values = max(others, key=lambda tensor: tensor.numel() * tensor.is_floating_point(), default=args[0])
    rows = touched_bytes(values)
    return read + rows, rows


def _loss_rows(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor], outputs: Any
) -> tuple[int, int]:
    logp, target = args[0], args[1]
    written = sum(map(touched_bytes, tensors_in(outputs)))
    return touched_bytes(target) + target.numel() * logp.element_size(), written


def _loss_rows_backward(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor], outputs: Any
) -> tuple[int, int]:
    """The gradient of the log probabilities is written whole; they themselves are not read."""
    return touched_bytes(args[0]) + touched_bytes(args[2]), touched_bytes(outputs)


def _optimizer(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor], outputs: Any
) -> tuple[int, int]:
    """A fused optimizer: its schema marks gradients as written, for the scaling that only fp16 asks for."""
    every = sum(map(touched_bytes, inputs))
    gradients = sum(map(touched_bytes, args[1])) if kwargs.get("grad_scale") is None else 0
    return every, every - gradients


_Traffic = Callable[[Plan, Sequence[Any], dict[str, Any], list[Tensor], Any], tuple[int, int]]
_TRAFFIC: dict[Any, _Traffic] = {
    **dict.fromkeys(
        (
            aten.embedding,
            aten.gather,
            aten.index_select,
            aten.index,
            aten.take,
        ),
        _rows_read,
    ),
    **dict.fromkeys(
        (
            aten.index_put_,
            aten._index_put_impl_,
            aten.scatter_,
            aten.scatter_add_,
            aten.index_add_,
            aten.index_copy_,
        ),
        _rows_written,
    ),
    aten.nll_loss_forward: _loss_rows,
    aten.nll_loss_backward: _loss_rows_backward,
    **dict.fromkeys(
        (aten._fused_adamw_, aten._fused_adam_, aten._fused_sgd_, aten._fused_adagrad_), _optimizer
    ),
}
