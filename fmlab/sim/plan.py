"""What an operator's schema says of it, read once: which arguments it writes, what it returns, its kind."""

from typing import Any

import torch

from fmlab.meter.compute import flop_formula

aten = torch.ops.aten
Position = tuple[int, str]

#: They make a tensor without writing it, or look at one in another way.
_FREE = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten._reshape_alias,
    aten.lift_fresh,
    aten.set_,
    aten.resize_,
    aten.record_stream,
    aten.is_same_size,
    aten._nested_tensor_size,
}
#: They write their first argument without reading it.
_OVERWRITE = {
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.normal_,
    aten.uniform_,
    aten.bernoulli_,
    aten.random_,
    aten.exponential_,
    aten.log_normal_,
    aten.geometric_,
    aten.cauchy_,
}
#: Element by element although torch does not tag them so.
_POINTWISE = {
    aten._to_copy,
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.zeros,
    aten.zeros_like,
    aten.ones,
    aten.ones_like,
    aten.full,
    aten.full_like,
    aten.clone,
    aten.native_dropout,
    aten.native_dropout_backward,
    aten.gelu_backward,
    aten.silu_backward,
    aten.threshold_backward,
    aten.tanh_backward,
    aten.sigmoid_backward,
    aten.masked_fill,
    aten.masked_fill_,
    aten.where,
}
#: They read a tensor and write less, or the same after a pass over a row: a fused kernel may end in them.
_REDUCTIONS = {
    aten.sum,
    aten.mean,
    aten.amax,
    aten.amin,
    aten.max,
    aten.min,
    aten.argmax,
    aten.argmin,
    aten.var,
    aten.var_mean,
    aten.std,
    aten.logsumexp,
    aten.linalg_vector_norm,
    aten.norm,
    aten.any,
    aten.all,
    aten._softmax,
    aten._log_softmax,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten._fused_rms_norm,
}


class Plan:
    """What is to be known of one operator overload before it runs.

    name:         "aten::add"
    returns:      for each returned value, the argument that it is (written in place), or None for a new one
    mutates:      arguments that are written
    reads_target: whether those are read as well
    view:         its results look at the memory of an argument
    free:         it moves no data and computes nothing
    has_device:   takes a device
    pointwise, reduction: kinds that a compiler fuses
    by_index:     takes indices, which may be a mask
    host_read:    the host needs its result before it can go on
    in_place:     writes arguments, of unchanged shape, and returns nothing else
    inplace_view: changes shape or strides of its argument
    flops:        the formula of torch's registry, called with shapes, or None; flops_raw: called with tensors
    """

    __slots__ = (
        "by_index",
        "flops",
        "flops_raw",
        "free",
        "has_device",
        "host_read",
        "in_place",
        "inplace_view",
        "mutates",
        "name",
        "packet",
        "pointwise",
        "reads_target",
        "reduction",
        "returns",
        "view",
    )

    def __init__(self, op: Any) -> None:
        schema, packet, tags = op._schema, op._overloadpacket, op.tags
        self.name, self.packet = schema.name, packet
        written: dict[str, Position] = {}
        mutates: list[Position] = []  # a list of tensors is written too, under no name
        for position, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            if alias is not None and alias.is_write:
                written.update(dict.fromkeys(alias.before_set, (position, argument.name)))
                mutates.append((position, argument.name))
        self.mutates: tuple[Position, ...] = tuple(mutates)
        self.returns: tuple[Position | None, ...] = tuple(
            _returned(value, written) for value in schema.returns
        )
        out_of_place = any(argument.is_out for argument in schema.arguments)
        self.reads_target = not out_of_place and packet not in _OVERWRITE
        self.view = any(
            value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
        )
        self.inplace_view = torch.Tag.inplace_view in tags
        self.free = self.view or self.inplace_view or packet in _FREE
        changed = bool(self.mutates) and not out_of_place and not self.inplace_view
        self.in_place = changed and packet is not aten.resize_ and None not in self.returns
        self.has_device = any(argument.name == "device" for argument in schema.arguments)
        self.pointwise = torch.Tag.pointwise in tags or packet in _POINTWISE
        self.reduction = packet in _REDUCTIONS
        self.by_index = packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
        self.host_read = not self.by_index and (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        )
        self.flops, self.flops_raw = flop_formula(packet)


def _returned(value: Any, written: dict[str, Position]) -> Position | None:
    alias = value.alias_info
    if alias is None or not alias.is_write:
        return None
    return next((written[name] for name in alias.before_set if name in written), None)


def needs_host(plan: Plan, inputs: list[torch.Tensor]) -> bool:
    """Whether the host must wait for the result: a number, or a size that data decide (a mask as index)."""
    if plan.by_index:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    return plan.host_read


_PLANS: dict[Any, Plan] = {}


def plan_of(op: Any) -> Plan:
    """The plan of an operator overload."""
    plan = _PLANS.get(op)
    if plan is None:
        plan = _PLANS[op] = Plan(op)
    return plan


def argument(position: Position, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value given for an argument; None where it was left out."""
    index, name = position
    return args[index] if index < len(args) else kwargs.get(name)
