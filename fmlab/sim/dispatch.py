"""An operator on simulated tensors: run it on the raw tensors, wrap what is new, charge what it cost."""

import threading
from typing import Any, cast

import psutil
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from fmlab.sim import attached, collective, numerics
from fmlab.sim.memory import block_of
from fmlab.sim.plan import Plan, argument, aten, needs_host, plan_of
from fmlab.sim.simulated import Simulated
from fmlab.sim.tensor import SimTensor
from fmlab.sim.units import binary
from fmlab.sim.where import WHERE

_thread = threading.local()
_LARGE = 2**30  # bytes from which on the host is asked whether it has them
CPU, META = torch.device("cpu"), torch.device("meta")
#: They take host tensors beside those on the device, as on every device: a list of indices, of any shape.
_HOST_INDICES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator overload. Raises what torch raises, SimOutOfMemory, and ValueError for a chip without
    a rate for the operands' dtype."""
    found = _ROUTES.get(op)
    plan, special, function = _route(op) if found is None else found
    if special is not None:
        return special(op, args, kwargs)
    inputs: list[Tensor] = []
    chip = _chip_of(args, kwargs, plan)
    device, dry = chip.device, chip.settings.dry
    mixed = plan.packet in _HOST_INDICES
    raw_args = tuple([_raw(value, device, inputs, dry, mixed) for value in args])
    raw_kwargs = {name: _raw(value, device, inputs, dry, mixed) for name, value in kwargs.items()}
    leaves = False
    if plan.has_device:
        target = raw_kwargs.get("device")
        host = META if dry else CPU
        leaves = target is not None and torch.device(target).type != "sim"
        raw_kwargs["device"] = target if leaves else host
        raw_kwargs.pop("pin_memory", None)
        _make_room(op, chip, raw_args, raw_kwargs)
    if dry and plan.in_place and _shapes_agree(plan, inputs):  # torch's own shape functions are slow
        written = tuple(argument(position, raw_args, raw_kwargs) for position in plan.returns if position)
        out: Any = written[0] if len(written) == 1 else written or None
    else:
        out = function(*raw_args, **raw_kwargs)
    if leaves:
        return out
    if (plan.host_read or plan.by_index) and needs_host(plan, inputs):
        chip.host_read(plan.name)
    result = _returned(plan, chip, op, args, kwargs, out)
    chip.charge(plan, raw_args, raw_kwargs, inputs, out)
    return result


def _shapes_agree(plan: Plan, inputs: list[Tensor]) -> bool:
    """Whether an in-place operator is known to be legal: all operands of one shape, or lists of a kernel."""
    if plan.name.startswith(("aten::_foreach_", "aten::_fused_")):
        return True
    return all(tensor.dim() == 0 or tensor.shape == inputs[0].shape for tensor in inputs)


#: operator -> (its plan, a function that does all, what to run on the raw tensors)
_ROUTES: dict[Any, tuple[Plan, Any, Any]] = {}


def _route(op: Any) -> tuple[Plan, Any, Any]:
    special = _SPECIAL.get(op)
    if collective.is_message(op):
        special = collective.run
    route = _ROUTES[op] = plan_of(op), special, numerics.AS_ON_CPU.get(op, op)
    return route


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch calls where no argument is a simulated tensor: functions that make one."""
    return run(op, args, kwargs)


# --- arguments ------------------------------------------------------------------------------------


def _chip_of(args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan) -> Simulated:
    """Of the first simulated tensor among the arguments; else of the device asked for."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is SimTensor:
            return attached.chip_at(value.device)
        if type(value) in (list, tuple):
            for item in value:
                if type(item) is SimTensor:
                    return attached.chip_at(item.device)
    return attached.chip_at(kwargs.get("device"))


def _raw(value: Any, device: torch.device, inputs: list[Tensor], dry: bool, mixed: bool) -> Any:
    """A value of a call with the raw tensors in it; they are added to `inputs`."""
    kind = type(value)
    if kind is SimTensor:
        if value.device != device:
            raise _mixed(device, value.device)
        inputs.append(value.raw)
        return value.raw
    if kind is list or kind is tuple:
        return kind([_raw(item, device, inputs, dry, mixed) for item in value])
    if isinstance(value, Tensor):
        if value.dim() and not mixed:
            raise _mixed(device, value.device)
        if dry and value.dim():
            value = value.to("meta")
        inputs.append(value)
    return value


def _mixed(first: torch.device, second: torch.device) -> RuntimeError:
    """In torch's own words."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}!"
    )


def _make_room(op: Any, chip: Simulated, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a tensor that cannot fit before the host allocates its numbers."""
    if op is aten.empty.memory_format or op is aten.empty_strided.default:
        size = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
        for extent in args[0]:
            size *= int(extent)
        chip.memory.check(size, op._schema.name, WHERE.here()[0])
        if size >= _LARGE and not chip.settings.dry:
            free = psutil.virtual_memory().available
            if size > free:
                raise MemoryError(
                    f"the host that simulates {chip.memory.name} has {binary(free)} free, and this tensor's "
                    f"numbers take {binary(size)}; simulate a smaller model, or dry=True, without numbers"
                )


# --- results --------------------------------------------------------------------------------------


def wrap(raw: Tensor, chip: Simulated, op: Any, line: str | None = None) -> SimTensor:
    """A simulated tensor around a raw one, its storage entered in the chip's memory."""
    if block_of(raw) is None:
        module, phase = WHERE.here()
        if line is None:
            line = "optimizer states" if phase == "optimizer" else "activations"
        chip.memory.enter(raw, line, op._schema.name, module)
    if chip.index and not hasattr(_thread, "single"):
        torch._C._set_multithreading_enabled(False)  # see fmlab.sim.device; it holds for one thread alone
        _thread.single = True
    result = SimTensor(raw, chip.device)
    if WHERE.accumulating():
        result._enter_as("gradients")
    return result


def _returned(
    plan: Plan, chip: Simulated, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    """What the caller gets: the argument itself where it was written in place, a new tensor elsewhere."""
    if plan.mutates:
        return _returned_in_place(plan, chip, op, args, kwargs, out)
    if isinstance(out, Tensor):
        line = None
        if plan.has_device and not WHERE.stack and not WHERE.optimizing:
            line = "other"
        return wrap(out, chip, op, line)
    return _wrap_all(out, chip, op)


def _wrap_all(value: Any, chip: Simulated, op: Any) -> Any:
    if isinstance(value, Tensor):
        return wrap(value, chip, op)
    if type(value) in (list, tuple):
        return type(value)([_wrap_all(item, chip, op) for item in value])
    return value


def _returned_in_place(
    plan: Plan, chip: Simulated, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    if plan.inplace_view:  # the wrapper's sizes and strides change too
        with no_dispatch():
            op(*args, **kwargs)
    single = not isinstance(out, tuple)
    results = [
        argument(position, args, kwargs) if position is not None else _wrap_all(value, chip, op)
        for position, value in zip(plan.returns, (out,) if single else out, strict=False)
    ]
    if not results:
        return None
    return results[0] if single else tuple(results)


# --- operators with a meaning of their own --------------------------------------------------------


_NOT_NUMERIC = ("device", "pin_memory", "non_blocking")


def _to_copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else source.device
    if target.type == "sim":
        target = attached.chip_at(target).device
    settings = {
        name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "non_blocking")
    }
    raw = source.raw if isinstance(source, SimTensor) else source
    if target.type != "sim":
        return _to_host(raw, source, target, settings, kwargs)
    chip = attached.chip_at(target)
    if not isinstance(source, SimTensor) or source.device != target:
        size = raw.numel() * (kwargs.get("dtype") or raw.dtype).itemsize
        chip.memory.check(size, "aten::_to_copy", WHERE.here()[0])
    where = META if chip.settings.dry else CPU
    out = aten._to_copy.default(raw, device=where, **settings)
    result = wrap(
        out, chip, op, None if isinstance(source, SimTensor) and source.device == target else "other"
    )
    _charge_copy(op, source, raw, out, chip)
    return result


def _to_host(
    raw: Tensor, source: SimTensor, target: torch.device, settings: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    if raw.device.type == "meta" and target.type != "meta":
        raise RuntimeError(_NO_NUMBERS.format(tuple(raw.shape)))
    out = aten._to_copy.default(raw, device=target, **settings)
    chip = attached.chip_at(source.device)
    chip.copy("to host", out.nbytes, tuple(out.shape), to_host=True, wait=not kwargs.get("non_blocking"))
    return cast(Tensor, out)


_NO_NUMBERS = (
    "a dry run has shapes, not numbers: this tensor {} cannot be copied to the host; simulate without "
    "dry=True, at a size that the host can hold"
)


def _charge_copy(op: Any, source: Any, raw: Tensor, out: Tensor, chip: Simulated) -> None:
    if isinstance(source, SimTensor) and source.device == chip.device:
        chip.charge(plan_of(op), (raw,), {}, [raw], out)
        return
    if isinstance(source, SimTensor):  # by way of the host
        attached.chip_at(source.device).copy("to another chip", raw.nbytes, tuple(raw.shape), to_host=False)
    chip.copy("from host", out.nbytes, tuple(out.shape), to_host=False)


def _copy_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    to, raw = getattr(target, "raw", target), getattr(source, "raw", source)
    if not isinstance(target, SimTensor):
        if raw.device.type == "meta":
            raise RuntimeError(_NO_NUMBERS.format(tuple(raw.shape)))
        to.copy_(raw)
        attached.chip_at(source.device).copy("to host", to.nbytes, tuple(to.shape), to_host=True)
        return target
    chip = attached.chip_at(target.device)
    if not chip.settings.dry:
        if raw.device.type == "meta":
            raise RuntimeError(_NO_NUMBERS.format(tuple(raw.shape)))
        to.copy_(raw)
    if isinstance(source, SimTensor) and source.device == target.device:
        chip.charge(plan_of(op), (to, raw), {}, [to, raw], to)
    elif source.dim() or isinstance(source, SimTensor):
        _charge_copy(op, source, raw, to, chip)
    return target


def _local_scalar(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    chip = attached.chip_at(tensor.device)
    chip.host_read("aten::item")
    if tensor.raw.device.type == "meta":
        return torch.ones((), dtype=tensor.dtype).item()
    return op(tensor.raw)


def _resize_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The raw tensor's storage may grow in place; the wrapper takes its new sizes from a new one."""
    target = args[0]
    chip = attached.chip_at(target.device)
    block = block_of(target.raw)
    op(target.raw, *args[1:], **kwargs)
    size = target.raw.untyped_storage().nbytes()
    if block is not None and block.size != size:
        block.memory.resized(block, size)
    Tensor.data.__set__(target, SimTensor(target.raw, chip.device))  # type: ignore[attr-defined]
    return target


def _composite(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return numerics.COMPOSITES[op._opname](*args, **kwargs)


def _same_kind(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor can take the other's numbers and keep its identity (torch asks before `.data = `)."""
    return type(args[0]) is type(args[1])


_SPECIAL: dict[Any, Any] = {
    **{getattr(aten, name).default: _composite for name in numerics.COMPOSITES},
    aten.resize_.default: _resize_,
    aten._has_compatible_shallow_copy_type.default: _same_kind,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._local_scalar_dense.default: _local_scalar,
}
