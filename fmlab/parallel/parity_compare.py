"""The arithmetic of `parity`: errors, and how large an error rounding explains.

Allowed errors are relative, for each parameter. They hold for sums of thousands of terms in another
order, and are far below what any mistake in scaling or in the choice of data causes.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fmlab.parallel.parity_report import Comparison, ParameterRow, ParityReport

if TYPE_CHECKING:
    from fmlab.parallel.parity_run import Job, Outcome

ALLOWED = {"fp32": 2e-5, "fp64": 1e-12}
BF16_ROUNDING = 2.0**-8  # no comparison in bf16 asks for less than one rounding
BF16_TIMES = 2.0  # a layout in bf16 may be this many times as far from fp32 as one device in bf16
SMALL_GRADIENT = 1e-6  # of the global norm: below, errors are relative to the global norm
ADAMW_NO_STEP = (
    1e-3  # elements whose gradient is below this part of the parameter's root mean square are left out
)
ADAMW_TIMES = 20.0  # AdamW divides by the gradient's own size, which magnifies the rounding of what is kept


def report(
    job: "Job",
    references: Sequence["Outcome"],
    outcome: "Outcome",
    ranks_differ: Sequence[str],
    targets: tuple[int, ...],
) -> ParityReport:
    """Compare with references[0]; references[1], in bf16, is one device in bf16: the measure."""
    reference, *own = references
    adamw = job.optimizer == "adamw"
    rows, excluded = [], 0
    for name, weight in reference.after.items():
        kept = _kept(reference, name) if adamw else None
        excluded += 0 if kept is None else int((~kept).sum())
        gradient = _gradient(reference, outcome, name)
        update = _weight(reference, outcome, name, kept)
        allowed_gradient = ALLOWED.get(job.precision, 0.0)
        allowed_weight = allowed_gradient * (ADAMW_TIMES if adamw else 1.0)
        if own:
            allowed_gradient = _bf16_allowance(_gradient(reference, own[0], name).error)
            allowed_weight = _bf16_allowance(_weight(reference, own[0], name, kept).error)
        rows.append(
            ParameterRow(
                name,
                tuple(weight.shape),
                Comparison(gradient.error, allowed_gradient, gradient.factor, gradient.cosine),
                Comparison(update.error, allowed_weight, update.factor, update.cosine),
            )
        )
    return ParityReport(
        engine=job.engine_name,
        layout=job.layout,
        precision=job.precision,
        steps=job.steps,
        optimizer=job.optimizer,
        targets=targets,
        loss=_numbers(reference.losses, outcome.losses, [o.losses for o in own], job.precision),
        grad_norm=_numbers(reference.norms, outcome.norms, [o.norms for o in own], job.precision),
        rows=rows,
        ranks_differ=tuple(ranks_differ),
        excluded=excluded,
    )


def _bf16_allowance(own_error: float) -> float:
    return BF16_TIMES * max(own_error, BF16_ROUNDING / BF16_TIMES)


def _numbers(
    reference: Sequence[float], found: Sequence[float], own: Sequence[Sequence[float]], precision: str
) -> Comparison:
    """The step with the largest error."""
    allowed = ALLOWED.get(precision, 0.0)
    if own:
        allowed = _bf16_allowance(max(_relative(r, o) for r, o in zip(reference, own[0], strict=True)))
    errors = [_relative(r, f) for r, f in zip(reference, found, strict=True)]
    worst = max(range(len(errors)), key=lambda i: math.inf if math.isnan(errors[i]) else errors[i])
    factor = found[worst] / reference[worst] if reference[worst] else math.nan
    return Comparison(errors[worst], allowed, factor)


def _relative(reference: float, found: float) -> float:
    if found == reference:
        return 0.0
    return abs(found - reference) / abs(reference) if reference else math.inf


def _gradient(reference: "Outcome", found: "Outcome", name: str) -> Comparison:
    theirs, ours = reference.gradients.get(name), found.gradients.get(name)
    if theirs is None and ours is None:  # frozen, or not used in this step
        return Comparison(0.0, 0.0, 1.0, 1.0)
    if theirs is None or ours is None:
        return Comparison(math.inf, 0.0, 0.0 if ours is None else math.inf, 0.0)
    a, b = theirs.double().flatten(), ours.double().flatten()
    total = reference.norms[0]
    size = a.norm().item()
    scale = size if size > SMALL_GRADIENT * total else total
    error = (b - a).norm().item()
    return Comparison(error / scale if error else 0.0, 0.0, _factor(a, b), _cosine(a, b))


def _weight(reference: "Outcome", found: "Outcome", name: str, kept: Tensor | None) -> Comparison:
    """Error of the weight relative to how far it moved, as far as its element type can tell."""
    before, a, b = (o[name] for o in (reference.before, reference.after, found.after))
    if kept is not None:
        before, a, b = before[kept], a[kept], b[kept]
    rounding = 4 * torch.finfo(a.dtype).eps * a.double().norm().item()
    moved, arrived = (a.double() - before.double()).flatten(), (b.double() - before.double()).flatten()
    error = max(0.0, (arrived - moved).norm().item() - rounding)
    size = moved.norm().item()
    ratio = error / size if size else (math.inf if error else 0.0)
    return Comparison(ratio, 0.0, _factor(moved, arrived), _cosine(moved, arrived))


def _kept(reference: "Outcome", name: str) -> Tensor:
    """Under AdamW: the elements whose gradient is more than rounding."""
    shape = reference.after[name].shape
    gradient = reference.gradients.get(name)
    if gradient is None:
        return torch.ones(shape, dtype=torch.bool)
    g = gradient.double()
    if g.norm().item() <= SMALL_GRADIENT * reference.norms[0]:
        return torch.zeros(shape, dtype=torch.bool)
    exact = g == 0  # an embedding row without a token: no gradient at all, so AdamW agrees
    return exact | (g.abs() > ADAMW_NO_STEP * g.square().mean().sqrt())


def _factor(a: Tensor, b: Tensor) -> float:
    square = torch.dot(a, a).item()
    return torch.dot(a, b).item() / square if square else (1.0 if not b.any() else math.inf)


def _cosine(a: Tensor, b: Tensor) -> float:
    product = (a.norm() * b.norm()).item()
    return torch.dot(a, b).item() / product if product else (1.0 if not (a - b).any() else 0.0)
