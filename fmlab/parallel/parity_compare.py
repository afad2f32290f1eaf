"""The arithmetic of `parity`: errors, and how large an error rounding explains.

Allowed errors are relative, for each parameter. They hold for sums of thousands of terms in another
order, and are far below what any mistake in scaling or in the choice of data causes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fmlab.parallel.parity_report import Comparison, ParameterRow, ParityReport

if TYPE_CHECKING:
    from fmlab.parallel.engine import StepResult
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
    targets: tuple[int, ...],
) -> ParityReport:
    """Compare with references[0]; references[1], in bf16, is one device in bf16: the measure."""
    reference, *own = references
    # Once the weights differ, so does everything that follows: the first step says where it began.
    rows, excluded = _rows(
        job, [replace(o, after=o.after_first) for o in references], outcome.after_first, outcome
    )
    if job.steps > 1 and all(row.ok for row in rows):
        rows, excluded = _rows(job, references, outcome.after, outcome)
    loss = _numbers(reference.losses, outcome.losses, [o.losses for o in own], job.precision)
    return ParityReport(
        engine=job.engine_name,
        layout=job.layout,
        precision=job.precision,
        steps=job.steps,
        optimizer=job.optimizer,
        targets=targets,
        loss=loss,
        grad_norm=_numbers(reference.norms, outcome.norms, [o.norms for o in own], job.precision),
        rows=rows,
        ranks_differ=tuple(outcome.ranks_differ),
        excluded=excluded,
        misreported=(*_misreported(reference, outcome, loss.allowed), *outcome.results_differ),
    )


def _rows(
    job: "Job", references: Sequence["Outcome"], after: dict[str, Tensor], outcome: "Outcome"
) -> tuple[list[ParameterRow], int]:
    """A row for each parameter, with the weights `after`; and how many elements AdamW makes us leave out."""
    reference, *own = references
    outcome = replace(outcome, after=after)
    adamw = job.optimizer == "adamw"
    rows, excluded, total = [], 0, _all_moved(reference)
    for name, weight in reference.after.items():
        kept = _kept(reference, name) if adamw else None
        excluded += 0 if kept is None else int((~kept).sum())
        gradient = _gradient(reference, outcome, name)
        update = _weight(reference, outcome, name, kept, total)
        allowed_gradient = ALLOWED.get(job.precision, 0.0)
        allowed_weight = allowed_gradient * (ADAMW_TIMES if adamw else 1.0)
        if own:
            allowed_gradient = _bf16_allowance(_gradient(reference, own[0], name).error)
            allowed_weight = _bf16_allowance(_weight(reference, own[0], name, kept, total).error)
        rows.append(
            ParameterRow(
                name,
                tuple(weight.shape),
                Comparison(gradient.error, allowed_gradient, gradient.factor, gradient.cosine),
                Comparison(update.error, allowed_weight, update.factor, update.cosine),
            )
        )
    return rows, excluded


def _misreported(reference: "Outcome", found: "Outcome", allowed: float) -> list[str]:
    """What an engine says wrongly of its steps, besides the loss and the norm."""
    wrong = []
    for i, (one, other) in enumerate(zip(reference.results, found.results, strict=True)):
        if one.count != other.count:
            wrong.append(f"step {i + 1} counts {other.count} targets instead of {one.count}")
        elif not _relative(one.loss_sum, other.loss_sum) <= allowed:
            wrong.append(f"step {i + 1} has a loss sum of {other.loss_sum:.6g} instead of {one.loss_sum:.6g}")
        if one.skipped != other.skipped:
            wrong.append(f"step {i + 1} is {'' if other.skipped else 'not '}called skipped")
    return wrong


def differing_results(every: Sequence[Sequence["StepResult"]]) -> list[str]:
    """In which step, and in what, the results of the ranks (by rank) are not the same."""
    found = []
    for i, results in enumerate(zip(*every, strict=True)):
        for name in ("loss", "loss_sum", "count", "grad_norm", "skipped"):
            values = [getattr(result, name) for result in results]
            if any(not _same(values[0], value) for value in values):
                found.append(f"step {i + 1} has another {name} on some ranks: {values}")
    return found


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))


def _bf16_allowance(own_error: float) -> float:
    return BF16_TIMES * max(own_error, BF16_ROUNDING / BF16_TIMES)


def _numbers(
    reference: Sequence[float], found: Sequence[float], own: Sequence[Sequence[float]], precision: str
) -> Comparison:
    """The first step with more than the allowed error, or else the one with the largest."""
    allowed = ALLOWED.get(precision, 0.0)
    if own:
        allowed = _bf16_allowance(max(_relative(r, o) for r, o in zip(reference, own[0], strict=True)))
    errors = [_relative(r, f) for r, f in zip(reference, found, strict=True)]
    bad = [i for i, error in enumerate(errors) if not error <= allowed]
    worst = bad[0] if bad else errors.index(max(errors))
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


def _all_moved(outcome: "Outcome") -> float:
    """How far all weights together have moved."""
    steps = [(outcome.after[n].double() - before.double()).norm() for n, before in outcome.before.items()]
    return torch.stack(steps).norm().item()


def _weight(
    reference: "Outcome", found: "Outcome", name: str, kept: Tensor | None, total: float
) -> Comparison:
    """Error of the weight relative to how far it moved, as far as its element type can tell.

    Where a gradient that is all rounding moved it, relative to how far all weights moved, as for gradients.
    """
    before, a, b = (o[name] for o in (reference.before, reference.after, found.after))
    if kept is not None:
        before, a, b = before[kept], a[kept], b[kept]
    eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    rounding = 4 * eps * a.double().norm().item()
    moved, arrived = (a.double() - before.double()).flatten(), (b.double() - before.double()).flatten()
    error = max(0.0, (arrived - moved).norm().item() - rounding)
    size = moved.norm().item()
    if name in reference.gradients and size <= SMALL_GRADIENT * total:
        size = total
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
