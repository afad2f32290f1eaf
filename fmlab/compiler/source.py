"""The function before it is differentiated, as torch.export shows it: where patterns are still whole.

After differentiation, attention that was written out is some fifteen operators in two graphs, whose halves
hold on to one another. Before, it is two products and a softmax; rewritten there, torch differentiates what
it was rewritten to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from fmlab.compiler import graph as g
from fmlab.compiler.errors import CaptureError, explained
from fmlab.compiler.flat import Flat
from fmlab.compiler.lines import Lines
from fmlab.compiler.passes.base import Pass, Report
from fmlab.compiler.survey import Survey

Call = Callable[[Sequence[Tensor]], Any]


@dataclass(frozen=True)
class Constant:
    """An input of an exported graph that is the same in every call."""

    value: Any


def rewritten(
    flat: Flat, args: Sequence[Any], kwargs: Mapping[str, Any], found: Survey, passes: Sequence[Pass]
) -> tuple[Call, list[tuple[str, Report]], list[str]]:
    """The function after `passes`, their reports, and why they were left out, if they were.

    Left out for a function with an autograd.Function of its own, whose backward this graph does not show, and
    for one that writes in place, where a value depends on when it is read.
    """

    def direct(tensors: Sequence[Tensor]) -> Any:
        with Lines():
            return flat.call(tensors)

    if not passes:
        return direct, [], []
    if found.functions:
        return direct, [], [f"rewrites left out: {', '.join(found.functions)} has a backward of its own"]
    module, order = export(flat, args, kwargs)
    writes = [node for node in g.calls(module.graph) if _writes(node)]
    if writes:
        return direct, [], [f"rewrites left out: the function writes in place ({g.name(writes[0])})"]
    reports = [("source", each.run(module.graph)) for each in passes]
    if not any(report.changed for _, report in reports):
        return direct, reports, []
    module.recompile()

    def call(tensors: Sequence[Tensor]) -> Any:
        inputs = (item.value if isinstance(item, Constant) else tensors[item] for item in order)
        return fx.Interpreter(module).run(*inputs)  # which hands on the lines that its nodes come from

    return call, reports, []


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def export(
    flat: Flat, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[fx.GraphModule, list[int | Constant]]:
    """torch.export's graph, and for each of its inputs the number of one of `flat`, or a constant.

    Raises CaptureError, with the user's line, where torch.export refuses.
    """
    try:
        program = torch.export.export(flat.module, tuple(args), dict(kwargs), strict=False)
    except Exception as error:
        if isinstance(error, CaptureError):
            raise
        raise explained(error) from error
    named: dict[str, Tensor] = dict(flat.module.named_parameters(remove_duplicate=False))
    named |= dict(flat.module.named_buffers(remove_duplicate=False))
    numbers = {id(named[entry.name]): i for i, entry in enumerate(flat.inputs) if entry.kind != "argument"}
    arguments = iter(i for i, entry in enumerate(flat.inputs) if entry.kind == "argument")
    order: list[int | Constant] = []
    for entry in program.graph_signature.input_specs:
        if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            order.append(numbers[id(named[str(entry.target)])])
        elif entry.kind is InputKind.CONSTANT_TENSOR:
            order.append(Constant(program.constants[str(entry.target)]))
        elif hasattr(entry.arg, "value"):  # a constant among the arguments: its input is there, unread
            order.append(Constant(entry.arg.value))
        else:
            order.append(next(arguments))
    if next(arguments, None) is not None:
        raise CaptureError("operator", "torch.export left out an argument", "give passes=[]")
    return program.graph_module, order
