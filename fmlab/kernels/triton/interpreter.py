"""Triton's interpreter, with what it lacks for numbers that can be trusted.

Triton can run a kernel as NumPy, program after program. Three things are added while a kernel runs:

- its library functions (tl.sum, tl.max, ...) are interpreted too. Triton decides that when it is imported, by
  the variable TRITON_INTERPRET; here it is not needed, so that a process can also compile;
- bf16 is stored as the bits of a 16-bit integer, so that arithmetic on it would be arithmetic on bits, and
  quietly wrong. Here that raises ValueError: write tl.load(...).to(tl.float32). Rounding fp32 to bf16 is to
  the nearest, ties to even, as on a GPU (Triton's interpreter cuts the digits off);
- observers see each load and store (`fmlab.kernels.triton.counting`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import triton
import triton.experimental.gluon  # loaded at the first launch otherwise, when its checks would fail
import triton.language as tl
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterError,
    TensorHandle,
    interpreter_builder,
    interpreter_semantic,
)

if TYPE_CHECKING:
    from fmlab.kernels.triton.launch import Kernel


class Observer(Protocol):
    """What wants to see the loads and stores of kernels. addresses and mask are arrays of the same shape."""

    def start(self, kernel: "Kernel", grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None: ...

    def load(self, addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> None: ...

    def store(self, addresses: np.ndarray, mask: np.ndarray, itemsize: int) -> None: ...


observers: list[Observer] = []
_interpreted: dict[Any, Any] = {}  # a function -> its interpreted form


def run(kernel: "Kernel", grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """Run all programs of a kernel on tensors of the CPU, one after the other.

    Raises ValueError for arithmetic on bf16; what else goes wrong inside is Triton's InterpreterError.
    """
    for observer in observers:
        observer.start(kernel, grid, arguments)
    own = kernel.fn.__globals__
    called: list[dict[str, Any]] = [own, vars(tl), vars(tl.standard), vars(tl.random)]
    with np.errstate(all="ignore"), _undone(own, *_TOUCHED):  # inf and nan are results, as on a GPU
        for names in called:
            names.update(_interpreted_functions(names))
            names["interpreter_semantic"] = interpreter_semantic  # called by the text of what is interpreted
        vars(interpreter_builder).update({**_honest_bf16(), **_observed()})
        try:
            _interpreted_form(kernel.fn)[grid](**arguments)
        except InterpreterError as error:
            if isinstance(error.__cause__, ValueError):
                raise ValueError(f"{kernel.__name__}: {error.__cause__}") from None
            raise


def refuse_environment() -> None:
    """Raise RuntimeError where Triton was imported in a way that only interprets."""
    if isinstance(tl.sum, InterpretedFunction):
        raise RuntimeError(
            "Triton was imported with TRITON_INTERPRET=1, so it can only interpret; unset the variable and "
            "start Python again (fmlab interprets kernels on the CPU without it)"
        )


def _interpreted_form(fn: Any) -> Any:
    if fn not in _interpreted:
        _interpreted[fn] = InterpretedFunction(getattr(fn, "fn", fn))
    return _interpreted[fn]


def _interpreted_functions(names: Mapping[str, Any]) -> dict[str, Any]:
    """The compiled functions among these names, in their interpreted form."""
    return {
        name: _interpreted_form(one) for name, one in names.items() if isinstance(one, triton.JITFunction)
    }


# What the interpreter, or we, change while a kernel runs. Triton undoes only part of it.
_TOUCHED = (
    tl, tl.core, tl.math, tl.standard, tl.random, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base,
    interpreter_builder,
)  # fmt: skip


@contextmanager
def _undone(*places: Any) -> Iterator[None]:
    """Whatever changes among the names of these modules, classes, objects and dicts is undone in the end."""
    before = [(place, dict(_names(place))) for place in places]
    try:
        yield
    finally:
        for place, names in before:
            for name, value in dict(_names(place)).items():
                if name not in names:
                    _remove(place, name)
                elif value is not names[name]:
                    _put(place, name, names[name])


def _names(place: Any) -> Mapping[str, Any]:
    return place if isinstance(place, dict) else vars(place)


def _put(place: Any, name: str, value: Any) -> None:
    if isinstance(place, dict):
        place[name] = value
    else:
        setattr(place, name, value)


def _remove(place: Any, name: str) -> None:
    if isinstance(place, dict):
        del place[name]
    else:
        delattr(place, name)


# --- bf16 -------------------------------------------------------------------------------------------


def _honest_bf16() -> dict[str, Callable[..., Any]]:
    """The builder's functions that meet bf16: casts that round right, and arithmetic that refuses it."""
    plain = interpreter_builder

    def cast(src: TensorHandle, dst_type: Any) -> TensorHandle:
        types = (src.dtype.scalar, dst_type.scalar)
        if types == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16)
            return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)
        if types == (tl.bfloat16, tl.float32):
            return TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return type(plain).cast_impl(plain, src, dst_type)

    def constant(value: float) -> TensorHandle:
        raise _on_bits()  # a number that is to meet a bf16 one

    def refusing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(one, TensorHandle) and one.dtype.scalar == tl.bfloat16 for one in args):
                raise _on_bits()
            return getattr(type(plain), name)(plain, *args, **kwargs)

        return call

    arithmetic = ("binary_op", "unary_op", "create_fma", "create_dot", "create_fabs", "create_rsqrt")
    return {"cast_impl": cast, "get_bf16": constant, **{name: refusing(name) for name in arithmetic}}


def _on_bits() -> ValueError:
    return ValueError(
        "arithmetic on bf16 in the interpreter would be on its bits; write tl.load(...).to(tl.float32)"
    )


# --- observers --------------------------------------------------------------------------------------


def _observed() -> dict[str, Callable[..., Any]]:
    """The builder's loads and stores, telling the observers; nothing where there is none."""
    if not observers:
        return {}
    plain = interpreter_builder

    def itemsize(pointers: TensorHandle) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def load(pointers: TensorHandle, mask: TensorHandle, *rest: Any) -> TensorHandle:
        for observer in observers:
            observer.load(pointers.data, mask.data, itemsize(pointers))
        return type(plain).create_masked_load(plain, pointers, mask, *rest)

    def store(pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any) -> Any:
        for observer in observers:
            observer.store(pointers.data, mask.data, itemsize(pointers))
        return type(plain).create_masked_store(plain, pointers, value, mask, *rest)

    def atomic(operation: Any, pointers: TensorHandle, value: Any, mask: TensorHandle, *rest: Any) -> Any:
        for observer in observers:
            observer.load(pointers.data, mask.data, itemsize(pointers))
            observer.store(pointers.data, mask.data, itemsize(pointers))
        return type(plain).create_atomic_rmw(plain, operation, pointers, value, mask, *rest)

    return {"create_masked_load": load, "create_masked_store": store, "create_atomic_rmw": atomic}
