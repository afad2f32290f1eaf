"""What `parity` refuses before it starts a process, as far as the model's shapes tell."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmlab.backends import check_backend
from fmlab.objectives.choice import objective_of
from fmlab.parallel.engines import refusals
from fmlab.parallel.layout import Layout
from fmlab.parallel.parity_batches import check_random, random_length

if TYPE_CHECKING:
    from fmlab.parallel.parity_run import Job


def check_model_function(model_fn: Any) -> None:
    """Raise ValueError for a model in the place of what builds it: each rank needs one of its own."""
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise ValueError(
            "model_fn builds the model, on each rank: give a function or a class, not an object of type "
            f"{type(model_fn).__name__}; for a model that is there, lambda: copy.deepcopy(model)"
        )


def check_steps(batches: Any, layout: Layout) -> None:
    """Raise ValueError for what is no list with the data of each step."""
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise ValueError(
            f"batches is a list with one entry for each step, got a {type(batches).__name__}; for one step "
            "on one batch give [batch]"
        )
    for number, step in enumerate(batches):
        try:
            if isinstance(step, Mapping):
                layout.split(dict(step), 0)
            elif not isinstance(step, Sequence) or len(step) != layout.data:
                ranks = len(step) if isinstance(step, Sequence) else type(step).__name__
                raise ValueError(f"a step has data for {ranks} ranks, the layout has data={layout.data}")
        except ValueError as error:
            raise ValueError(f"step {number}: {error}") from error


def built(model_fn: Callable[[], Any]) -> nn.Module:
    """The model. Raises ValueError when it is none."""
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model_fn must return a torch module, and it gave {model!r}")
    return model


def check_before_launch(job: "Job", world_size: int) -> None:
    """Raise ValueError for a layout that cannot run this model or these batches, or not on so many ranks.

    The model is built on the meta device; one that cannot be is looked at on the ranks.
    """
    model = _on_meta(job)
    objective = job.objective
    if objective is None and model is not None:
        objective = usual_objective(model, job)
    if job.batches is None and model is not None:
        check_random(model)
    length = None if model is None else random_length(getattr(model, "config", None))
    if job.batches is not None:
        first: Any = job.batches[0] if job.batches else {}
        if not isinstance(first, Mapping):
            first = next((batch for rank in first for batch in rank), {})
        ids = first.get("input_ids")
        length = ids.shape[1] if ids is not None and ids.dim() > 1 else None
    job.layout.validate(world_size, None, model, length, objective)
    check_backend(job.backend)
    if isinstance(job.engine, str):
        refusals.check(job.engine, job.layout, model)


def usual_objective(model: nn.Module, job: "Job") -> Any:
    """What the model's family was made with; over a batch that is cut, without terms that depend on how."""
    objective = objective_of(model)
    if depends_on_cut(objective, job) and hasattr(objective, "without_cut"):
        return objective.without_cut()
    return objective


def depends_on_cut(part: Any, job: "Job") -> str:
    """Why a model or an objective computes something else on the batch as the layout cuts it; "" if not."""
    layout = job.layout
    if layout.world_size * layout.micro_batches == 1:
        return ""
    if job.by_hand and layout.micro_batches == 1 and getattr(part, "exact_over_ranks", False):
        return ""
    return getattr(part, "depends_on_cut", "")


def _on_meta(job: "Job") -> nn.Module | None:
    try:
        with torch.device("meta"):
            model = job.model_fn()
    except Exception:  # one that looks at numbers while it is built; its own errors come later
        return None
    return built(lambda: model)
