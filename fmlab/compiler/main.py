"""compile(): capture, passes, and a module that runs the result."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fmlab.compiler.capture import Eager, Program, capture
from fmlab.compiler.codegen import GenerateCpp
from fmlab.compiler.compiled import Compiled
from fmlab.compiler.fusion import Fusion
from fmlab.compiler.interface import drop_unneeded
from fmlab.compiler.memory import InPlace
from fmlab.compiler.passes import (
    Algebra,
    AttentionToSDPA,
    CommonSubexpressions,
    ConstantFolding,
    DeadCode,
    JoinSlices,
    Layout,
    Norms,
    Pass,
    PassManager,
    SplitBias,
)


def default_passes() -> list[Pass]:
    """Those that cost nothing where they find nothing: patterns first, then what they leave to clean up."""
    return [
        AttentionToSDPA(),
        Norms(),
        DeadCode(),
        ConstantFolding(),
        Algebra(),
        Layout(),
        CommonSubexpressions(),
        DeadCode(),
    ]


def fusing_passes(folder: Path | None = None) -> list[Pass]:
    """default_passes(), then fusion and C++ for the fused groups, which are built in `folder` (a cache folder
    if not given) and overwrite what they read last."""
    return [*default_passes(), JoinSlices(), SplitBias(), Fusion(), GenerateCpp(folder), InPlace()]


def compile(
    model: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    passes: Iterable[Pass] | None = None,
    backward: bool = True,
    partition: str = "default",
    fallback: str | None = None,
    show: bool = False,
) -> Compiled | Eager:
    """A module that computes and trains as `model(*inputs, **kwargs)` does, from optimized graphs.

    Its parameters are the model's own. It is for calls with the shapes, dtypes, modes and constants of this
    one, and refuses others.

    Args:
        passes: default_passes() if not given; fusing_passes() for C++; [] for the graphs as captured.
        backward, partition, fallback: see capture.
        show: print what each pass did.

    Raises CaptureError (a ValueError), with the line of the user's code, for what a graph cannot hold.
    """
    manager = PassManager(default_passes() if passes is None else passes)
    program = capture(
        model,
        *inputs,
        kwargs=kwargs,
        backward=backward,
        partition=partition,
        fallback=fallback,
        rewrites=manager.source,
    )
    if isinstance(program, Eager):
        return program
    optimize(program, manager, show)
    return Compiled(program)


def optimize(program: Program, manager: PassManager, show: bool = False) -> None:
    """Run a manager's passes over a program's graphs, and hand over between them only what is still read."""
    program.reports += [(step.graph, step.report) for step in manager.run(program.graphs, show)]
    drop_unneeded(program)
