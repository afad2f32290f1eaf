"""A lesson-sized but real compiler over torch.fx: capture, passes, and a module that runs the result.

    program = capture(model, batch)          a forward and a backward graph of ATen operators
    fast = compile(model, batch)             the same after passes, as a module that trains
    print(program)                           the graphs as text
    PassManager(passes).steps(graphs)        one pass at a time, with a report of what changed

torch differentiates and knows the shapes; what is here is what happens to a graph afterwards.
"""

from fmlab.compiler.capture import Eager, Program, capture
from fmlab.compiler.compiled import Compiled
from fmlab.compiler.errors import CaptureError, Line
from fmlab.compiler.flat import Input
from fmlab.compiler.main import compile, default_passes, optimize
from fmlab.compiler.passes import (
    Algebra,
    AttentionToSDPA,
    CommonSubexpressions,
    ConstantFolding,
    DeadCode,
    GraphPass,
    Layout,
    MergeProducts,
    Norms,
    Pass,
    PassManager,
    Report,
    ShapePropagation,
    Step,
)
from fmlab.compiler.runner import Runner

__all__ = [
    "Algebra",
    "AttentionToSDPA",
    "CaptureError",
    "CommonSubexpressions",
    "Compiled",
    "ConstantFolding",
    "DeadCode",
    "Eager",
    "GraphPass",
    "Input",
    "Layout",
    "Line",
    "MergeProducts",
    "Norms",
    "Pass",
    "PassManager",
    "Program",
    "Report",
    "Runner",
    "ShapePropagation",
    "Step",
    "capture",
    "compile",
    "default_passes",
    "optimize",
]
