"""Watching a step operator by operator: what the host reads, which dtypes appear, how large the graph is.

Operators are seen where torch dispatches them, so that those inside torch's own functions and of the backward
pass count too. Some ways of reading a tensor are not dispatched (`tolist`, `numpy`, `cpu`, printing); they
are seen as functions of a tensor.
"""

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fmlab.backends.preflight.where import Modules, caller, calling_line, in_optimizer

aten = torch.ops.aten
#: Operators whose answer has as many entries as the numbers in it say: no fixed shape. By name: not every
#: version of torch has all of them.
DATA_SHAPED = {
    "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive",
    "aten.repeat_interleave.Tensor", "aten.bincount",
}  # fmt: skip
_UNDISPATCHED = {
    Tensor.tolist: "tolist()",
    Tensor.numpy: "numpy()",
    Tensor.cpu: "cpu()",
    Tensor.__array__: "numpy",
    Tensor.__repr__: "print",
    Tensor.__format__: "format",
}
_PRODUCTS = {"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"}
_LOG_SOFTMAX = {"aten._log_softmax"}
_SOFTMAX = {"aten._softmax", "aten._log_softmax"}
BF16_EXACT = 256  # the largest integer up to which bfloat16, with 8 significant bits, holds each one


@dataclass(frozen=True)
class Seen:
    """Something at a place: `what` in words, `where` as file:line, and the module."""

    what: str
    where: str
    module: str

    def place(self) -> str:
        return f"{self.where} ({self.module})" if self.module else self.where


@dataclass
class Record:
    """One step as it was watched.

    reads: what the host read                  shaped: operators whose result's shape depends on numbers
    doubles: float64 results                   infinite: -inf, or what becomes -inf in bf16
    narrow: losses over many classes in bf16   nans: softmax of rows that are masked completely
    products: (batch, rows, inner, columns) of matrix products      queries: query lengths of attention
    program: the operators with their shapes and constants: equal lists are one compiled program
    places: where each of them was called first
    """

    reads: Counter[Seen] = field(default_factory=Counter)
    shaped: Counter[Seen] = field(default_factory=Counter)
    doubles: Counter[Seen] = field(default_factory=Counter)
    infinite: Counter[Seen] = field(default_factory=Counter)
    narrow: Counter[Seen] = field(default_factory=Counter)
    nans: Counter[Seen] = field(default_factory=Counter)
    products: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    queries: Counter[int] = field(default_factory=Counter)
    program: list[tuple[str, str]] = field(default_factory=list)
    places: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def operators(self) -> int:
        return len(self.program)


class Watch:
    """`with Watch(modules) as record:` fills the record while the block runs."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self.record = Record()
        self.quiet = 0
        self.in_attention = False
        self._open = ExitStack()

    def __enter__(self) -> Record:
        self._open.enter_context(self.modules.watched())
        self._open.enter_context(_Functions(self))
        self._open.enter_context(_Operators(self))
        return self.record

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def seen(self, what: str) -> Seen:
        return Seen(what, caller(), self.modules.current)


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record, kwargs = self.watch.record, kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            record.queries[args[0].shape[-2] if args else kwargs["query"].shape[-2]] += 1
            self.watch.in_attention = True  # its own -inf are torch's affair
            try:
                return func(*args, **kwargs)
            finally:
                self.watch.in_attention = False
        word = _UNDISPATCHED.get(func)
        if word is None or in_optimizer():
            return func(*args, **kwargs)
        if not self.watch.quiet:
            record.reads[self.watch.seen(word)] += 1
        self.watch.quiet += 1  # what it reads inside is this one read
        try:
            return func(*args, **kwargs)
        finally:
            self.watch.quiet -= 1


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        record, name = self.watch.record, str(func.overloadpacket)
        if func is aten._local_scalar_dense.default:
            if not self.watch.quiet and not in_optimizer():  # whose count of steps lives on the host
                record.reads[self.watch.seen(_how_read())] += 1
            return _one(args[0]) if args[0].is_meta else func(*args, **kwargs)
        if name == "aten.equal":
            record.reads[self.watch.seen("torch.equal")] += 1
        if name in DATA_SHAPED or str(func) in DATA_SHAPED or _boolean_index(name, args):
            record.shaped[self.watch.seen(name.removeprefix("aten."))] += 1
        result = func(*args, **kwargs)
        call = (name, _described(args, kwargs, result))
        record.program.append(call)
        if call not in record.places:
            record.places[call] = self.watch.seen(name).place()
        self._dtypes(name, args, kwargs, result)
        if name in _PRODUCTS:
            record.products[_sizes(name, args)] += 1
        elif name.startswith("aten._scaled_dot_product"):  # a fused kernel of this machine, called by itself
            record.products.update(_attention_products(name, args))
            record.queries[args[1 if "backward" in name else 0].shape[-2]] += 1
        return result

    def _dtypes(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        record, watch = self.watch.record, self.watch
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        if any(value.dtype == torch.float64 for value in outputs) and not in_optimizer():
            record.doubles[watch.seen(name.removeprefix("aten."))] += 1
        if name in _LOG_SOFTMAX and args[0].dtype in (torch.bfloat16, torch.float16):
            classes = args[0].shape[args[1]]
            if classes > BF16_EXACT:
                dtype = str(args[0].dtype).removeprefix("torch.")
                record.narrow[watch.seen(f"log-softmax of {classes:,} classes in {dtype}")] += 1
        if name in _SOFTMAX and not outputs[0].is_meta and bool(outputs[0].isnan().any()):
            record.nans[watch.seen("softmax")] += 1
        if name == "aten._to_copy" and _overflows(args[0], outputs[0]):
            record.infinite[watch.seen("a float32 number that is infinite in bf16,")] += 1
        numbers = (value for value in (*args, *kwargs.values()) if isinstance(value, float))
        if -math.inf in numbers and not watch.in_attention:
            record.infinite[watch.seen("-inf")] += 1


def _how_read() -> str:
    """What the user wrote to read a number, from the text of the line."""
    line = calling_line()
    if ".item(" in line:
        return "item()"
    if line.startswith(("if ", "elif ", "while ", "assert ")) or " if " in line or "bool(" in line:
        return "a branch on a tensor"
    return next((f"{word}()" for word in ("float", "int") if f"{word}(" in line), "a number of a tensor")


def _one(tensor: Tensor) -> Any:
    """What is read from a tensor without numbers: 1, so that the step goes on."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _boolean_index(name: str, args: Any) -> bool:
    """x[mask]: as many rows as the mask has ones."""
    if name != "aten.index" or len(args) < 2:
        return False
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])


def _described(args: Any, kwargs: Any, result: Any) -> str:
    """Shapes, dtypes and constants of one call. An optimizer's numbers change with each step, and reach the
    device as data: they are left out.
    """

    def word(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, float) and in_optimizer():
            return "float"
        return repr(value) if isinstance(value, int | float | bool | str) else type(value).__name__

    return " ".join(word(value) for value in tree_flatten((args, kwargs, result))[0])


def _overflows(before: Tensor, after: Tensor) -> bool:
    """Whether numbers became infinite by being rounded to bf16."""
    if after.dtype != torch.bfloat16 or before.dtype == after.dtype or after.is_meta:
        return False
    return bool(after.isinf().any()) and not bool(before.isinf().any())


def _attention_products(name: str, args: Any) -> list[tuple[int, int, int, int]]:
    """The matrix products in a fused attention kernel: two forward; four backward, without recomputing."""
    query, key = args[1:3] if "backward" in name else args[0:2]
    heads, q, d, k = query.shape[0] * query.shape[1], query.shape[-2], query.shape[-1], key.shape[-2]
    if "backward" in name:
        return [(heads, q, d, k), (heads, k, q, d), (heads, q, k, d), (heads, k, q, d)]
    return [(heads, q, d, k), (heads, q, k, d)]


def _sizes(name: str, args: Any) -> tuple[int, int, int, int]:
    a, b = (args[1], args[2]) if name in ("aten.addmm", "aten.baddbmm") else (args[0], args[1])
    batch = a.shape[0] if a.dim() == 3 else 1
    return batch, a.shape[-2], a.shape[-1], b.shape[-1]
