"""What makes a layout legal: every reason why one cannot run, found before any process starts.

    problems(Layout(tensor=3), model=GPT.from_preset("gpt2"))
    # ["tensor=3 cannot divide blocks.1.attention.qkv.weight (12 heads) ...; legal are 1, 2, 3, ..."]

Arithmetic on the shapes and the plan of a model, which may live on the meta device; no ranks are needed.
Strategies are asked here what they ask again when they are built. What a production engine cannot do beside
that, fmlab.parallel.engines.refusals says.
"""

import math
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmlab.models.drafted_plan import draft_plan
from fmlab.models.families import longest_row
from fmlab.models.plan import ParallelPlan, Rule, check_places
from fmlab.parallel import values
from fmlab.parallel.grid import divisors

if TYPE_CHECKING:
    from fmlab.parallel.layout import Layout

_SHOWN = 12  # legal values named in a message
_MOST_RANKS = 1024  # larger degrees are not looked for
_MOST_WORLD = 2**20  # of more ranks no nearest layout is looked for
_NEAREST = 3  # other layouts named in a message
_AXES = ("data", "tensor", "context", "pipeline")
_PLANNED = ("tensor", "context", "expert", "pipeline")


@dataclass(frozen=True)
class Case:
    """What a layout is to run. What is None is not looked at.

    world_size: ranks there are. global_batch: rows of a step. seq_len: tokens of a row. objective: the loss.
    """

    layout: "Layout"
    world_size: int | None = None
    global_batch: int | None = None
    model: nn.Module | None = None
    seq_len: int | None = None
    objective: Any = None

    def __post_init__(self) -> None:
        """Raises ValueError for what is no number or no model at all."""
        for name, least in (("world_size", 1), ("global_batch", 0), ("seq_len", 0)):
            if (value := getattr(self, name)) is not None:
                values.whole(value, f"{name}={reprlib.repr(value)}", least)
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise ValueError(f"model: give a torch module (it may be on the meta device), not {self.model!r}")

    @cached_property
    def plan(self) -> ParallelPlan | None:
        """The model's declaration; None if it makes none. Raises ValueError for one that cannot be."""
        declared: Any = getattr(self.model, "parallel_plan", None)
        if declared is None:
            return None
        try:
            plan = declared() if callable(declared) else declared
        except NotImplementedError:  # a family derived from fmlab.models.base.Model that says nothing
            return None
        if not callable(declared) or not isinstance(plan, ParallelPlan):
            raise ValueError(
                f"{type(self.model).__name__}.parallel_plan must be a method that returns an "
                f"fmlab.models.plan.ParallelPlan, got {type(plan).__name__}"
            )
        if self.needs_plan:
            assert self.model is not None
            check_places(self.model, plan)
        return plan

    @property
    def needs_plan(self) -> list[str]:
        """The axes of the layout that a model is divided along by its plan."""
        return [axis for axis in _PLANNED if getattr(self.layout, axis) > 1]

    @cached_property
    def divided(self) -> dict[tuple[Rule, torch.Size], str]:
        """(rule, shape) -> name of the first such parameter that tensor parallelism divides."""
        found: dict[tuple[Rule, torch.Size], str] = {}
        if self.plan is not None and self.model is not None:
            for name, parameter in self.model.named_parameters():
                rule = self.plan.rule(name)
                if rule.kind not in ("replicate", "expert"):
                    found.setdefault((rule, parameter.shape), name)
        return found

    @cached_property
    def experts(self) -> int:
        """How many experts a layer has; 0 without."""
        if self.plan is None or self.model is None:
            return 0
        named = self.model.named_parameters()
        return next((len(p) for name, p in named if self.plan.rule(name).kind == "expert"), 0)

    @cached_property
    def tensor_degrees(self) -> list[int]:
        """The tensor degrees that divide every matrix of the model."""
        pieces = [_pieces(rule, shape) for rule, shape in self.divided if rule.kind != "vocab"]
        most = min(max(pieces, default=1), _MOST_RANKS)
        legal = set(range(1, most + 1))
        for rule, shape in self.divided:
            legal &= set(rule.degrees(shape, most))
        return sorted(legal)

    @cached_property
    def most_stages(self) -> int | None:
        """Into how many stages a pipeline can cut the model; None where that is not known."""
        return None if self.plan is None else len(self.plan.cuts) + 1


def problems(
    layout: "Layout",
    world_size: int | None = None,
    global_batch: int | None = None,
    model: nn.Module | None = None,
    seq_len: int | None = None,
    objective: Any = None,
) -> list[str]:
    """Every reason why the layout cannot run this; empty if it is legal. See Case for the arguments."""
    case = Case(layout, world_size, global_batch, model, seq_len, objective)
    return [text for rule in RULES for text in rule(case)]


def check(*args: Any, **kwargs: Any) -> None:
    """Raise ValueError with all of `problems(...)`, if there are any."""
    found = problems(*args, **kwargs)
    if len(found) == 1:
        raise ValueError(found[0])
    if found:
        listed = "".join(f"\n({number}) {text}" for number, text in enumerate(found, 1))
        raise ValueError(f"{len(found)} things are wrong with this layout:{listed}")


# ---- ranks and rows ----------------------------------------------------------------------------------------


def _ranks(case: Case) -> Iterator[str]:
    layout, world = case.layout, case.world_size
    if world is None or world == layout.world_size:
        return
    named = " x ".join(
        f"{axis}={getattr(layout, axis)}" for axis in _AXES if getattr(layout, axis) > 1 or axis == "data"
    )
    others = layout.world_size // layout.data
    advice = f" or set data={world // others}" if world % others == 0 else ""
    nearest = [" x ".join(f"{axis}={n}" for axis, n in found.items()) for found in _nearest(case, world)]
    yield (
        f"{layout} needs {layout.world_size} ranks ({named}), but there are {world}; "
        f"start {layout.world_size} ranks (torchrun --nproc-per-node {layout.world_size}, %%ranks "
        f"{layout.world_size} or fmlab.Ranks({layout.world_size})){advice}"
        + (f"; nearest for {world}: {', '.join(nearest)}" if nearest and not advice else "")
    )


def _nearest(case: Case, world: int) -> list[dict[str, int]]:
    """The degrees closest to the layout's that multiply to `world` and are legal for the model."""
    found: list[tuple[float, dict[str, int]]] = []
    if world > _MOST_WORLD:
        return []
    for tensor in divisors(world):
        for context in divisors(world // tensor):
            for pipeline in divisors(world // tensor // context):
                degrees = {"data": world // tensor // context // pipeline, "tensor": tensor}
                degrees |= {"context": context, "pipeline": pipeline}
                try:
                    other = replace(case.layout, **degrees)  # type: ignore[arg-type]
                except ValueError:
                    continue
                distance = sum(abs(math.log2(n / getattr(case.layout, axis))) for axis, n in degrees.items())
                new_axes = sum(n > 1 and getattr(case.layout, axis) == 1 for axis, n in degrees.items())
                if not problems(other, world, None, case.model, case.seq_len, case.objective):
                    found.append((distance + new_axes, {axis: n for axis, n in degrees.items() if n > 1}))
    found.sort(key=lambda item: item[0])
    return [degrees or {"data": 1} for _, degrees in found[:_NEAREST]]


def _rows(case: Case) -> Iterator[str]:
    layout, rows = case.layout, case.global_batch
    parts = layout.data * layout.micro_batches
    if rows is None or (rows > 0 and rows % parts == 0):
        return
    below = rows // parts * parts
    nearest = [size for size in (below, below + parts) if size > 0]
    legal = [] if rows % layout.micro_batches else divisors(rows // layout.micro_batches)
    yield (
        f"a global batch of {rows} rows cannot be cut into data x micro_batches = "
        f"{layout.data} x {layout.micro_batches} = {parts} equal parts; "
        f"use {' or '.join(map(str, nearest))} rows"
        + (f", or data in [{_listed(legal)}] with micro_batches={layout.micro_batches}" if legal else "")
    )


def _one_piece(case: Case) -> Iterator[str]:
    if case.layout.micro_batches > 1 and getattr(case.objective, "whole_batch", False):
        yield f"micro_batches={case.layout.micro_batches}: {in_one_piece(case.objective)}"


def in_one_piece(objective: Any) -> str:
    """Why a loss over whole batches has no micro-batches, and what to do."""
    return (
        f"{type(objective).__name__} compares each sample with all others of the global batch, so its loss "
        "is no sum over micro-batches; give each rank one micro-batch (micro_batches=1), and use more data "
        "ranks for a larger batch"
    )


# ---- the plan ----------------------------------------------------------------------------------------------


def _plan(case: Case) -> Iterator[str]:
    if case.model is None or case.plan is not None:
        return
    asked = case.needs_plan
    if asked:
        named = " and ".join(f"{axis}={getattr(case.layout, axis)}" for axis in asked)
        yield (
            f"{named} read from the model's parallel plan how its matrices may be divided and where its "
            f"blocks may be cut, and {type(case.model).__name__} has none; give it a method parallel_plan(). "
            f"{draft_plan(case.model).advice}. Without a plan, data, zero, fsdp and micro_batches work"
        )


def _tensor(case: Case) -> Iterator[str]:
    degree = case.layout.tensor
    if degree == 1 or case.plan is None:
        return
    if not case.divided:
        yield f"tensor={degree}: the plan of {type(case.model).__name__} divides no parameter"
        return
    seen: dict[str, str] = {}
    for (rule, shape), name in case.divided.items():
        if degree not in rule.degrees(shape, degree):
            seen.setdefault(rule.pattern, f"{name} ({_what(rule, shape)})")
    if seen:
        legal = _listed(case.tensor_degrees)
        yield f"tensor={degree} cannot divide {', '.join(seen.values())}; legal are {legal}"
        return
    from fmlab.parallel.tensor.check import check as check_tensor

    model, plan = case.model, case.plan
    assert model is not None
    yield from _refused(lambda: check_tensor(model, plan, degree, case.layout.sequence_parallel))


def _length(case: Case) -> Iterator[str]:
    """Any length can be cut, for parts are padded; but a model has so many positions."""
    limit = longest_row(getattr(case.model, "config", None))
    if case.seq_len is not None and limit is not None and case.seq_len > limit:
        yield f"rows of {case.seq_len} tokens are longer than the model's {limit} positions; shorten them"


def _context(case: Case) -> Iterator[str]:
    layout = case.layout
    if layout.context == 1 or case.plan is None or case.model is None:
        return
    from fmlab.parallel import context
    from fmlab.parallel.context.ulysses import check_heads

    attentions = context.attention_modules(case.model)
    if not case.plan.sequence or not attentions:
        yield context.uncut(case.model)
    elif layout.context_method == "ulysses":
        shares = {tuple(max(n // layout.tensor, 1) for n in context.heads(each)) for each in attentions}
        for query, key_value in sorted(shares):
            yield from _refused(lambda q=query, kv=key_value: check_heads(q, kv, layout.context))  # type: ignore[misc]


def _stages(case: Case) -> Iterator[str]:
    layout, model, plan = case.layout, case.model, case.plan
    if layout.pipeline == 1:
        return
    from fmlab.parallel import pipeline
    from fmlab.sim.schedule import check_schedule

    yield from _refused(
        lambda: check_schedule(layout.schedule, layout.pipeline, layout.micro_batches, layout.virtual_stages)
    )
    stages, most = layout.pipeline * layout.virtual_stages, case.most_stages
    if most is not None and stages > most:
        each = f" x virtual_stages={layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        yield (
            f"pipeline={layout.pipeline}{each} needs {stages} stages, and {type(model).__name__} can be cut "
            f"into {most} at most; legal are pipeline up to {most // layout.virtual_stages}"
        )
    elif model is not None and plan is not None:
        yield from _refused(lambda: pipeline.check(model, plan, layout))


def _refused(ask: Callable[[], Any]) -> Iterator[str]:
    """What a strategy's own check says."""
    try:
        ask()
    except ValueError as error:
        yield str(error)


def _recompute(case: Case) -> Iterator[str]:
    kind, model = case.layout.recompute, case.model
    if kind == "none" or model is None:
        return
    from fmlab.parallel import recompute

    if kind == "selective":
        yield from _refused(lambda: recompute.attention_modules(model))
    else:
        yield from _refused(lambda: recompute.layers_of(model, case.plan))


def _experts(case: Case) -> Iterator[str]:
    degree = case.layout.expert
    if degree == 1 or case.plan is None:
        return
    if not case.experts:
        yield f"expert={degree}: {type(case.model).__name__} has no experts to divide; leave expert out"
    elif case.experts % degree:
        legal = [n for n in divisors(case.experts) if case.layout.data % n == 0]
        yield f"expert={degree} does not divide {case.experts} experts; legal are {_listed(legal)}"


def _batch_statistics(case: Case) -> Iterator[str]:
    layout, model = case.layout, case.model
    if model is None or layout.data * layout.context * layout.micro_batches == 1:
        return
    from fmlab.parallel.ddp.replicas import check_no_batch_statistics

    yield from _refused(lambda: check_no_batch_statistics(model))


#: Each looks at one thing and yields what is wrong with it, with what is legal.
RULES: tuple[Callable[[Case], Iterator[str]], ...] = (
    _ranks,
    _rows,
    _one_piece,
    _plan,
    _tensor,
    _context,
    _length,
    _stages,
    _recompute,
    _experts,
    _batch_statistics,
)


def _pieces(rule: Rule, shape: torch.Size) -> int:
    """How many pieces that may not be torn apart the rule finds in each part of a parameter."""
    dim = {"row": 1, "head": 1}.get(rule.kind, 0)
    return shape[dim] // (rule.parts * rule.unit)


def _what(rule: Rule, shape: torch.Size) -> str:
    if rule.kind == "head" or rule.unit > 1:
        return f"{_pieces(rule, shape)} heads"
    return f"{_pieces(rule, shape)} {'inputs' if rule.kind == 'row' else 'outputs'}"


def _listed(values: list[int]) -> str:
    rest = len(values) - _SHOWN
    return ", ".join(map(str, values[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")
