"""A device that answers the calls that a chip's documentation names, on a machine without the chip.

It takes torch's one name for a further device, so it lives in a process of its own. Its tensors compute on
the CPU. `calls` lists what the program under test asked of the device's module.
"""

import contextlib
import sys
from types import SimpleNamespace

import torch
from torch.utils import _mode_utils
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

calls: list[str] = []
NAME = ""


class Stream:
    """A queue that is always empty."""

    def __init__(self, *args, **kwargs):
        calls.append("Stream")

    def wait_stream(self, other):
        pass


class Module:
    """What both chips have."""

    Stream = Event = Stream
    cores, index = 4, 0

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        calls.append("device_count")
        return self.cores

    def current_device(self):
        calls.append("current_device")
        return self.index

    def set_device(self, index):
        calls.append(f"set_device({index})")
        self.index = index

    def device(self, index):
        return contextlib.nullcontext()

    def stream(self, stream):
        calls.append("stream")
        return contextlib.nullcontext()

    def current_stream(self, device=None):
        return Stream()

    def manual_seed(self, seed):
        pass

    def manual_seed_all(self, seed):
        calls.append(f"manual_seed_all({seed})")

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float32]

    def get_device_name(self, device=None):
        return self.get_device_properties(device).name


class NeuronModule(Module):
    """torch.neuron. The allocator is asynchronous: what it says is old until the device was waited for."""

    def __init__(self):
        self.known = self.highest = 0

    def get_device_properties(self, device=None):
        return SimpleNamespace(name="trn2", total_memory=24 * 2**30)

    def is_bf16_supported(self):
        return True

    def synchronize(self):
        calls.append("synchronize")
        self.known += 1000
        self.highest = max(self.highest, self.known)

    def memory_allocated(self):
        return self.known

    def max_memory_allocated(self):
        return self.highest

    def memory_reserved(self):
        return self.known * 2

    def memory_summary(self):
        return f"allocated {self.known}"

    def reset_peak_memory_stats(self):
        calls.append("reset_peak_memory_stats")
        self.highest = self.known


class TPUModule(Module):
    """torch.tpu of torch-tpu 0.2.0; it refuses device calls to programs: torch.accelerator has them."""

    cores = 1

    def get_device_properties(self, device=None):
        return SimpleNamespace(name="TPU v7", total_memory=96 * 2**30)

    def synchronize(self, device=None):
        calls.append("synchronize")


def _refusing(method):
    def guarded(self, *args, **kwargs):
        if sys._getframe(1).f_globals.get("__name__", "").startswith("fmlab"):
            raise RuntimeError(f"torch.tpu.{method} is internal: use torch.accelerator")
        return getattr(Module, method)(self, *args, **kwargs)

    return guarded


for refused in ("is_available", "device_count", "current_device", "set_device", "current_stream"):
    setattr(TPUModule, refused, _refusing(refused))


class OnDevice(torch.Tensor):
    """A tensor of the device: the right device, sizes and strides, and its numbers in `raw` on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        device = torch.device(NAME, 0)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), None, raw.dtype, raw.layout, device
        )
        tensor.raw = raw
        return tensor

    def tolist(self):
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _run(op, args, kwargs or {})


def _run(op, args, kwargs):
    """Run an operator on the CPU tensors; what is written in place is given back as the tensor it was."""
    inner_args, inner = _inner(args), {key: _inner(value) for key, value in kwargs.items()}
    to_host = False
    if inner.get("device") is not None:
        to_host = torch.device(inner["device"]).type != NAME
        inner["device"] = "cpu"
    inner.pop("pin_memory", None)
    result = op(*inner_args, **inner)
    if torch.Tag.inplace_view in op.tags:
        with _mode_utils.no_dispatch():
            op(*args, **kwargs)
    written = {id(_inner(value)): value for value in (*args, *kwargs.values()) if isinstance(value, OnDevice)}
    return result if to_host else _outer(result, written)


def _inner(value):
    if isinstance(value, OnDevice):
        return value.raw
    if isinstance(value, torch.Tensor) and value.dim() and value.device.type == "cpu" and NAME:
        return value
    return type(value)(_inner(item) for item in value) if isinstance(value, list | tuple) else value


def _outer(value, written):
    if isinstance(value, torch.Tensor):
        return written[id(value)] if id(value) in written else OnDevice(value)
    return type(value)(_outer(item, written) for item in value) if isinstance(value, list | tuple) else value


def register(name, module):
    """Make `name` the further device of this process, with `module` as torch.<name>."""
    global NAME, _libraries
    NAME = name
    _setup_privateuseone_for_python_backend(name, backend_module=module)
    boxed, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    boxed.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")

    boxed.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # no rules: only the switch

    def copy(source, target, non_blocking=False):
        _inner(target).copy_(_inner(source))
        return target

    aten.impl("_copy_from", copy, "PrivateUse1")
    _libraries = (boxed, aten)  # they undo themselves when they are collected
    return module
