"""Which line of the user's code a node of a graph comes from."""

import re
import sys
from typing import Any

from torch import fx
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from fmlab.compiler.errors import Line, is_users, user_line

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class Lines(TorchFunctionMode):
    """While a function is traced: notes the user's line in each node that comes from a call on it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        place = f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'
        fx_traceback.get_current_meta()["stack_trace"] = place
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        fx_traceback.get_current_meta().pop("stack_trace", None)  # what follows is autograd's
        super().__exit__(*error)


def line_of_node(node: fx.Node) -> Line | None:
    """The user's line behind a node of a forward graph, or None where that is not known."""
    return user_line((file, int(number)) for file, number in _FRAME.findall(node.stack_trace or ""))


def lines_by_number(graph: fx.Graph) -> dict[int, Line]:
    """The user's line by autograd's number of an operation; its nodes in the backward graph have it too."""
    found: dict[int, Line] = {}
    for node in graph.nodes:
        line = line_of_node(node)
        if line is not None and "seq_nr" in node.meta:
            found.setdefault(node.meta["seq_nr"], line)
    return found
