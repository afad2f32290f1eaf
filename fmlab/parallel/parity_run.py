"""Does a layout compute what one device computes? Run both from the same weights and data, and compare."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmlab.backends import get_backend
from fmlab.models.dropout import Masks, drawing_masks
from fmlab.parallel import parity_compare as compare
from fmlab.parallel import values
from fmlab.parallel.composed import Composed
from fmlab.parallel.ddp import replicas
from fmlab.parallel.engine import Engine, Objective, OptimizerFactory, StepResult
from fmlab.parallel.engine_checks import check_objective, check_terms, checked_max_grad_norm
from fmlab.parallel.layout import Batch, Layout
from fmlab.parallel.parity_batches import random_batches
from fmlab.parallel.parity_legal import (
    built,
    check_before_launch,
    check_model_function,
    check_steps,
    depends_on_cut,
    usual_objective,
)
from fmlab.parallel.parity_report import ParityReport
from fmlab.parallel.select import EngineChoice, parallelize
from fmlab.parallel.single import SingleDevice

#: One step's data: a global batch, cut by the layout, or the micro-batches of each rank.
StepData = Batch | Sequence[Sequence[Batch]]
PRECISIONS = ("fp32", "fp64", "bf16")
_OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    "adamw": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
}


@dataclass(frozen=True)
class Job:
    """All that a rank needs to know; see `parity`."""

    model_fn: Callable[[], nn.Module]
    layout: Layout
    engine: EngineChoice
    batches: Sequence[StepData] | None
    precision: str
    steps: int
    objective: Objective | None
    optimizer: str
    max_grad_norm: float | None
    seed: int
    backend: str = "auto"

    @property
    def loss(self) -> Objective:
        """The objective, once the model is known."""
        assert self.objective is not None
        return self.objective

    @property
    def draws_masks(self) -> bool:
        """Whether the engine draws dropout masks that one device can draw too."""
        return self.engine == "fmlab" or getattr(self.engine, "dropout_seed", None) is not None

    @property
    def by_hand(self) -> bool:
        """Whether the engine is ours, or a variant of it."""
        return self.engine == "fmlab" or (isinstance(self.engine, type) and issubclass(self.engine, Composed))

    @property
    def engine_name(self) -> str:
        """What the report calls the engine."""
        return self.engine if isinstance(self.engine, str) else getattr(self.engine, "__name__", "custom")


def parity(
    model_fn: Callable[[], nn.Module],
    layout: Layout,
    engine: EngineChoice = "fmlab",
    batches: Sequence[StepData] | None = None,
    precision: str | None = None,
    steps: int = 2,
    ranks: Any = None,
    objective: Objective | None = None,
    optimizer: str = "sgd",
    max_grad_norm: float | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> ParityReport:
    """Compare loss, gradient norm, every gradient and every updated weight of a layout with one device.

    model_fn:  builds the model; called on each rank after a different seed. The first rank's weights are the
               reference: an engine that does not share them out is caught. Dropout is compared under engine
               "fmlab", whose masks one device draws too (fmlab.models.dropout); else it must be off.
    steps:     more than one also finds what an engine keeps from step to step by mistake. The table shows the
               weights after the first step if anything differs there, else after the last.
    objective: what the loss is; default: what the model's family was made with.
    batches:   one entry for each step: a global batch, which `layout.split` cuts, or a list with the list of
               micro-batches of each rank. Default: random tokens, more targets on some ranks than on others.
    precision: "fp32", "fp64" (the proof, where rounding cannot hide anything), or "bf16" (allowed: twice the
               error that bf16 causes on one device). Default: that of the layout.
    ranks:     a pool of fmlab.Ranks to run on; by default one is started for the call. Inside a process group
               (torchrun) of the right size every rank calls `parity` and gets the report.
    optimizer: "sgd" or "adamw". AdamW turns a gradient that is all rounding into a full step, so weights with
                          hardly any gradient are left out there and counted.
    backend:   on what the layout runs ("sim:h100"); one device is always this machine's best.

    Errors are ‖difference‖ / ‖gradient‖ of each parameter; where that norm is below 1e-6 of the global
    norm, the global norm divides. Raises ValueError, before any process starts, for a choice that does not
    exist and for a layout that is not legal (see fmlab.parallel.legal); and for a model with a random
    forward.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout: give a fmlab.parallel.Layout, not {layout!r}")
    check_model_function(model_fn)
    if objective is not None:
        check_objective(objective)
    precision = precision or layout.precision
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: legal are {', '.join(PRECISIONS)}")
    if optimizer not in _OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: legal are {', '.join(_OPTIMIZERS)}")
    if optimizer == "adamw" and precision == "bf16":
        raise ValueError(
            "AdamW makes whole steps of bf16's rounding; compare AdamW in fp32 or fp64, bf16 under sgd"
        )
    if batches is not None:
        check_steps(batches, layout)
        steps = len(batches)
    steps = values.whole(steps, f"{steps} steps")
    max_grad_norm = checked_max_grad_norm(max_grad_norm)
    layout = replace(layout, precision="bf16" if precision == "bf16" else "fp32")
    job = Job(
        model_fn,
        layout,
        engine,
        batches,
        precision,
        steps,
        objective,
        optimizer,
        max_grad_norm,
        seed,
        backend,
    )
    if dist.is_available() and dist.is_initialized():
        return run_on_rank(job)
    check_before_launch(job, layout.world_size if ranks is None else ranks.n)
    if ranks is not None:
        return _first(ranks, job)
    if layout.world_size == 1:
        return run_on_rank(job)
    from fmlab.ranks import Ranks

    with Ranks(layout.world_size) as own:
        return _first(own, job)


def _first(ranks: Any, job: Job) -> ParityReport:
    report: ParityReport = ranks.run(run_on_rank, job)[0]
    return report


@dataclass
class Outcome:
    """What one engine computed: results by step, first gradients, weights before, after the first step and
    after the last; and what of all that is not the same on every rank (parameters, then fields of results).
    """

    before: dict[str, Tensor]
    results: list[StepResult] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    after_first: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    ranks_differ: list[str] = field(default_factory=list)
    results_differ: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """By step."""
        return [result.loss for result in self.results]

    @property
    def norms(self) -> list[float]:
        """Of the gradients before clipping, by step."""
        return [result.grad_norm for result in self.results]


def run_on_rank(job: Job) -> ParityReport:
    """One rank's part of `parity`; every rank returns the report."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(job.seed + 1000 * rank)  # replicas that are not made equal must be found out
    model = built(job.model_fn)
    if job.precision == "fp64":
        model = model.double()
    job = replace(job, objective=job.objective or usual_objective(model, job))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    job.layout.validate(world_size, model=model, objective=job.objective)
    _check_cut(model, job)
    batches = job.batches or _random(model, job)
    data = [_cast(step, job.precision) for step in batches]

    reference: list[Outcome] = []

    def run_reference() -> None:
        _check_deterministic(copy.deepcopy(model), data[0], job)
        precisions = ["fp32", "bf16"] if job.precision == "bf16" else ["fp32"]
        reference.extend(_run_single(copy.deepcopy(model), data, job, precision) for precision in precisions)

    if dist.is_initialized():
        replicas.run_on_first(run_reference, dist.group.WORLD)
    else:
        run_reference()

    engine = parallelize(
        model,
        job.layout,
        job.loss,
        _OPTIMIZERS[job.optimizer],
        job.engine,
        get_backend(job.backend),
        job.max_grad_norm,
    )
    if job.draws_masks:
        engine.dropout_seed = job.seed
    place = job.layout.data_rank(rank)
    mine = [_of_place(step, place, job.layout) for step in data]
    outcome = _run(engine, mine)
    engine.close()
    report = None
    if rank == 0:
        report = compare.report(job, reference, outcome, _targets(data[0], job))
    return _share(report)


def _check_cut(model: nn.Module, job: Job) -> None:
    """Refuse to compare what a cut batch computes differently by its own definition."""
    for part in (job.loss, model):
        if why := depends_on_cut(part, job):
            raise ValueError(f"parity of {type(part).__name__} over a batch that is cut means nothing: {why}")


def _random(model: nn.Module, job: Job) -> Sequence[StepData]:
    rows = 2 * job.layout.data * job.layout.micro_batches
    return random_batches(model, rows, job.steps, job.seed)


def _share(report: ParityReport | None) -> ParityReport:
    box = [report]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def _run_single(model: nn.Module, data: Sequence[StepData], job: Job, precision: str) -> Outcome:
    engine = SingleDevice(
        model,
        Layout(precision=precision),
        job.loss,
        _OPTIMIZERS[job.optimizer],
        get_backend(),
        job.max_grad_norm,
    )
    engine.dropout_seed = job.seed if job.draws_masks else None
    whole = [[step] if isinstance(step, Mapping) else [b for rank in step for b in rank] for step in data]
    if engine.whole_batch:  # samples are compared across ranks, so one device must see them together
        whole = [[{name: torch.cat([b[name] for b in step]) for name in step[0]}] for step in whole]
    return _run(engine, whole)


def _run(engine: Engine, steps: Sequence[Sequence[Batch]]) -> Outcome:
    outcome = Outcome(_clone(engine.full_params()))
    for i, micro_batches in enumerate(steps):
        outcome.results.append(engine.step(micro_batches))
        if i == 0:
            outcome.gradients = _clone(engine.full_grads())
            outcome.after_first = _clone(engine.full_params())
            differ = {*_ranks_differ(engine, outcome.gradients), *_ranks_differ(engine, outcome.after_first)}
    outcome.after = _clone(engine.full_params())
    differ = differ or set(_ranks_differ(engine, outcome.after))
    outcome.ranks_differ = [name for name in engine.ledger.entries if name in differ]
    if engine.layout.world_size > 1:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, outcome.results)
        outcome.results_differ = compare.differing_results(every)
    return outcome


def _ranks_differ(engine: Engine, tensors: dict[str, Tensor]) -> list[str]:
    if engine.layout.world_size == 1:
        return []
    every = {name: tensors.get(name, torch.zeros(())) for name in engine.ledger.entries}
    return replicas.differing(every, dist.group.WORLD)


def _clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _of_place(step: StepData, place: int, layout: Layout) -> Sequence[Batch]:
    """The micro-batches of a place on the data axis."""
    return layout.split(step, place) if isinstance(step, Mapping) else step[place]


def _targets(step: StepData, job: Job) -> tuple[int, ...]:
    return tuple(
        sum(
            int(count)
            for batch in _of_place(step, place, job.layout)
            for count in job.loss.counts(batch).values()
        )
        for place in range(job.layout.data)
    )


def _cast(step: StepData, precision: str) -> StepData:
    """Inputs with a fraction (images, audio) in the element type of the model."""
    if precision != "fp64":
        return step
    if isinstance(step, Mapping):
        return {name: t.double() if t.is_floating_point() else t for name, t in step.items()}
    return [[_cast(batch, precision) for batch in rank] for rank in step]  # type: ignore[misc]


def _check_deterministic(model: nn.Module, step: StepData, job: Job) -> None:
    """Raise ValueError when two forward passes with different seeds differ, or when nothing can be compared:
    without a target, and where one device's own loss is not a number."""
    batches: Iterable[Batch] = [step] if isinstance(step, Mapping) else [b for rank in step for b in rank]
    batch = next((b for b in batches if any(int(c) for c in job.loss.counts(b).values())), None)
    if batch is None:
        raise ValueError("the first step has no target on any rank, so that there is nothing to compare")
    backend, sums = get_backend(), []
    masks = Masks(job.seed, 0) if job.draws_masks else None
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad(), drawing_masks(masks):
            terms = job.loss(backend.to_device(model), backend.to_device(batch))
        check_terms(job.loss, terms, job.loss.counts(batch))
        sums.append({name: term.sum.item() for name, term in terms.items()})
    if not all(math.isfinite(value) for value in sums[0].values()):
        raise ValueError(f"the loss on one device is {sums[0]}, so that there is nothing to compare with")
    if sums[0] != sums[1]:
        raise ValueError(
            "two forward passes on the same batch gave different losses, so that there is nothing to compare "
            "with; build the model without dropout or other randomness"
            + (" than that of fmlab.models.dropout" if job.draws_masks else "")
        )
