"""Checkers of notebook 1.12."""

import itertools
import math
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

_RULES = {
    ("whole", "whole"): "whole",
    ("rows", "whole"): "rows",
    ("whole", "columns"): "columns",
    ("columns", "rows"): "partial",
}


@exercise("1.12.1", "how a product lies on the devices", returns=str)
def propagate(answer: Answer) -> str:
    cases = list(itertools.product(("whole", "rows", "columns"), repeat=2))
    for x, w in cases:
        right = _RULES.get((x, w), "must move")
        got = answer(x, w)
        if got == right:
            continue
        what = f"got {got!r}, not {right!r}, for x by {x} and w by {w}"
        if right == "partial":
            raise NotYet(what, "each device has a summand", "a part of k gives a part of every sum over k")
        if (x == "columns") != (w == "rows"):
            raise NotYet(
                what,
                "k must be divided in both",
                "with part of k of one, a device needs that part of the other",
            )
        if right == "must move":
            raise NotYet(
                what, "a device would hold one block only", "of n x m blocks each device has the diagonal one"
            )
        raise NotYet(what, "ask what one device can multiply", "take two devices and write down their parts")
    return f"{len(cases)} pairs of placements"


@exercise("1.12.2", "a branch that can be captured")
def safe_root(answer: Answer) -> str:
    import torch

    probe = torch.tensor([[-2.0, 0.0, 4.0], [9.0, -1e-3, 1e-12]], dtype=torch.float64)
    right = torch.where(probe > 0, probe.abs().sqrt(), 0.0)
    x = probe.clone().requires_grad_()
    got = answer(x)
    if got.shape != probe.shape or not torch.allclose(got, right, rtol=1e-12, atol=0):
        raise NotYet(
            f"got {got.tolist()}", "give the exact values", "4 gives 2, and 0 gives 0: nothing may be added"
        )
    captured = _captured(answer, probe)
    got.sum().backward()
    assert x.grad is not None
    if not torch.isfinite(x.grad).all():
        raise NotYet(
            f"the gradient is {x.grad.tolist()}",
            "zero times infinity",
            "both branches are computed, and so are both gradients: give the root something safe",
        )
    slope = torch.where(probe > 0, 0.5 / right.clamp(min=1e-300), 0.0)
    if not torch.allclose(x.grad, slope, rtol=1e-9):
        raise NotYet(f"the gradient is {x.grad.tolist()}", "1 / (2 sqrt(x)) above 0, else 0")
    if not torch.allclose(captured(-probe), torch.where(probe < 0, probe.abs().sqrt(), 0.0)):
        raise NotYet("the captured program answers for one input only", "for any data")
    return "values, gradients, torch.fx and torch.export"


def _captured(answer: Answer, probe: Any) -> Any:
    """The learner's function as an exported program. Raises NotYet where a front end cannot have it."""
    import torch
    from torch import fx, nn

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return answer.fn(x)

    try:
        fx.symbolic_trace(answer.fn)
        program = torch.export.export(Module(), (probe,))
    except Exception as error:
        first = str(error).strip().splitlines()[0][:90]
        raise NotYet(
            f"capture fails: {first}", "a Python branch asks for data", "choose element by element instead"
        ) from None
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            raise NotYet(
                f"the result of {node.target} has as many elements as the data says",
                "a shape that depends on data",
                "keep the shape of x, and choose element by element",
            )
    return program.module()


@exercise("1.12.3", "a mean over unequal devices", returns=(int, float))
def whole_mean(answer: Answer) -> str:
    nan = math.nan
    cases: list[tuple[list[float], list[int], float]] = [
        ([2.0, 4.0], [3, 1], 2.5),
        ([1.0, nan, 5.0], [2, 0, 2], 3.0),
        ([7.0], [4], 7.0),
        ([nan, nan], [0, 0], 0.0),
    ]
    for means, rows, right in cases:
        try:
            got = answer(means, rows)
        except NotYet:
            if sum(rows):
                raise
            raise NotYet(f"it fails for rows {rows}", "no rows at all", "then the mean is 0") from None
        if math.isclose(got, right):
            continue
        what = f"got {got:g}, not {right:g}, for means {means} of {rows} rows"
        if math.isnan(got):
            raise NotYet(what, "NaN times 0 is NaN", "leave out the devices without rows")
        raise NotYet(what, "weigh each mean by its rows", "the mean of 3 rows counts three times")
    return f"{len(cases)} batches"
