"""What `parity` refuses before it starts a process, as far as the model's shapes tell."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmlab.objectives.choice import objective_of
from fmlab.parallel.engines import refusals
from fmlab.parallel.parity_batches import random_length

if TYPE_CHECKING:
    from fmlab.parallel.parity_run import Job


def check_before_launch(job: "Job") -> None:
    """Raise ValueError for a layout that cannot run this model or these batches.

    The model is built on the meta device; one that cannot be is looked at on the ranks.
    """
    model = _on_meta(job)
    objective = job.objective
    if objective is None and model is not None:
        objective = usual_objective(model, job)
    rows, length = None, None if model is None else random_length(getattr(model, "config", None))
    if job.batches is not None:
        first: Any = job.batches[0]
        if isinstance(first, Mapping):
            rows = next((len(t) for t in first.values()), None)
        else:
            first = next((batch for rank in first for batch in rank), {})
        ids = first.get("input_ids")
        length = ids.shape[1] if ids is not None and ids.dim() > 1 else None
    job.layout.validate(job.layout.world_size, rows, model, length, objective)
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
            return job.model_fn()
    except Exception:  # one that looks at numbers while it is built; its own errors come later
        return None
