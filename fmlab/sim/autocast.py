"""Autocast on a simulated chip, by the CPU's rules: matrix products in low precision, some losses in fp32.

torch has no rules for a device from outside. The CPU's are taken so that bf16 runs the CPU's kernels on the
CPU's dtypes; NVIDIA's rules also put softmax and norms in fp32. Last bits differ all the same where a model
asks for the CPU by name, as the attention of fmlab.models does while it learns.
"""

from typing import Any

import torch
from torch import Tensor

from fmlab.sim.charge import tensors_in

#: Operators that the CPU runs in the precision asked for, and those that it runs in the widest that they get;
#: all others of its list run in fp32. Which ones are on the list is asked of torch, whose versions differ.
_LOW = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    *("bmm", "mm", "addmm", "addbmm", "baddbmm", "linear", "matmul", "_convolution", "linalg_vecdot"),
    *(
        "prelu",
        "_addmm_activation",
        "scaled_dot_product_attention",
        "_native_multi_head_attention",
        "mkldnn_rnn_layer",
    ),
}
_WIDEST = {"stack", "cat", "index_copy"}
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def register() -> list[Any]:
    """Put the rules in place; the libraries to keep alive."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            to = None if packet in _LOW else "widest" if packet in _WIDEST else torch.float32
            aten.impl(name, _casting(op, to), "AutocastPrivateUse1")
    return [everything, aten]


def _casting(op: Any, to: Any) -> Any:
    key: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
    keys = torch._C.DispatchKeySet(key)

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = torch.get_autocast_dtype("sim") if to is None else to
            if dtype == "widest":
                dtype = _widest(args)
            return op(*(_cast(a, dtype) for a in args), **{n: _cast(v, dtype) for n, v in kwargs.items()})

    return cast


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        if dtype is None or value.dtype not in _CASTABLE or value.dtype == dtype:
            return value
        return value.to(dtype) if value.device.type == "sim" else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _widest(args: Any) -> torch.dtype | None:
    kinds = [tensor.dtype for tensor in tensors_in(args) if tensor.dtype in _CASTABLE]
    if len(set(kinds)) < 2:
        return None
    widest = kinds[0]
    for dtype in kinds[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest
