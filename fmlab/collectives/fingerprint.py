"""What a rank is about to do: the call, its tensor, its arguments, and the user's line that made it."""

import linecache
import os
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmlab.meter.traffic import C10D_OPS, FUNCTIONAL_OPS, group_ranks, tensors_of

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_STANDARD = os.path.dirname(os.__file__)
_P2P = {"send", "recv"}
_ANY_SHAPE = {"all_to_all", "scatter"}  # ranks may give tensors of other shapes


class Call(NamedTuple):
    """One collective as one rank calls it. `where` is the line of the user's code."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    details: str
    where: str

    def __str__(self) -> str:
        tensor = f" {self.dtype}{list(self.shape)}" if self.dtype else ""
        details = f", {self.details}" if self.details else ""
        return f"{self.op}{tensor}{details} {self.where}".rstrip()


def describe(tensor: Tensor | None) -> tuple[tuple[int, ...], str]:
    """Shape and type, as a fingerprint holds them."""
    if tensor is None:
        return (), ""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def of_operator(func: Any, args: tuple[Any, ...]) -> tuple[str, tuple[int, ...], Call] | None:
    """(group, its global ranks, call) of an operator of c10d; None for what is not a collective."""
    name = func._schema.name.split("::")[1]
    table = C10D_OPS if func.namespace == "c10d" else FUNCTIONAL_OPS
    if name not in table or table[name][0] in _P2P:
        return None
    op, _ = table[name]
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    inputs = [value for key, value in given.items() if key.startswith("input")] or list(given.values())[:1]
    tensors = list(tensors_of(inputs))
    shape, dtype = describe(tensors[0] if tensors and op != "barrier" else None)
    details = [f"{len(tensors)} tensors"] if len(tensors) > 1 and op not in _ANY_SHAPE else []
    details += [f"root {given['root_rank']}"] if "root_rank" in given else []
    details += [f"op {word}"] if (word := _reduce_op(given)) else []
    call = Call(op, () if op in _ANY_SHAPE else shape, dtype, ", ".join(details), caller())
    ranks = group_ranks(func, args)
    return _group_name(given), ranks, call


def _group_name(given: dict[str, Any]) -> str:
    if "group_name" in given:
        return str(given["group_name"])
    return str(torch.distributed.ProcessGroup.unbox(given["process_group"]).group_name)


def _reduce_op(given: dict[str, Any]) -> str:
    """The operation of a reduction. c10d's operators carry it in an object that Python cannot open, so it is
    read from the frame of the function that was called."""
    value = given.get("reduce_op")
    if value is None or isinstance(value, str):
        return str(value or "").lower()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d" and "op" in frame.f_locals:
            return str(frame.f_locals["op"]).rpartition(".")[2].rstrip(">").partition(":")[0].lower()
        frame = frame.f_back
    return ""


def caller() -> str:
    """The innermost line that is neither torch's nor this package's nor the standard library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, _TORCH, _STANDARD, "<frozen", "<string>")):
            line = linecache.getline(file, frame.f_lineno).strip()
            place = f"at {os.path.basename(file)}:{frame.f_lineno}"
            return f"{place}, in {frame.f_code.co_name}: {line}" if line else place
        frame = frame.f_back
    return ""
