"""What every engine refuses of a model, an objective and an optimizer, before anything is divided."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from fmlab.parallel import values
from fmlab.parallel.ledger import Ledger


def checked_max_grad_norm(norm: float | None) -> float | None:
    """The norm as a number, None (or infinite) for no clipping. Raises ValueError unless it is above 0."""
    if norm is None or norm == math.inf:
        return None
    advice = "give a norm above 0, or None for no clipping"
    return values.above_zero(norm, f"max_grad_norm={norm!r}", advice)


def check_gradients(model: nn.Module, ledger: Ledger) -> None:
    """Raise ValueError for parameters whose gradient cannot be summed in a bucket, normed and clipped."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{name!r} is a {type(module).__name__} with sparse=True, but gradients must be dense: "
                "build it with sparse=False"
            )
    for name, parameter in ledger.trainable().items():
        if parameter.is_complex():
            raise ValueError(f"{name!r} is complex; hold its real and imaginary parts as a real parameter")


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError for a model whose gradients torch sums over ranks by itself."""
    for name, module in model.named_modules():
        if isinstance(module, DataParallel | DistributedDataParallel):
            raise ValueError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, which would sum gradients a "
                "second time; give the engine the model inside (wrapped.module)"
            )


def check_objective(objective: Any) -> None:
    """Raise ValueError for an objective that cannot say how many targets a batch has."""
    if isinstance(objective, type):
        raise ValueError(f"{objective.__name__} is a class; give an object of it: {objective.__name__}()")
    if not callable(objective) or not callable(getattr(objective, "counts", None)):
        raise ValueError(
            f"{objective!r} is no objective: it must be callable as (model, batch) -> named terms "
            "(fmlab.objectives.Term), and have a method counts(batch) that says before any forward pass how "
            "many targets each term has"
        )


def check_terms(objective: Any, terms: Any, counted: Iterable[str]) -> None:
    """Raise ValueError unless an objective has returned the terms that it counts."""
    name = type(objective).__name__
    if not isinstance(terms, Mapping):
        raise ValueError(
            f"{name} must return its terms by name, {{name: Term(sum, count)}}, and gave a "
            f"{type(terms).__name__}"
        )
    if set(terms) != set(counted):
        raise ValueError(f"{name} returned the terms {sorted(terms)} and counts {sorted(counted)}")


def check_own_parameters(optimizer: Optimizer, ledger: Ledger) -> None:
    """Raise ValueError for an optimizer of other tensors than the engine's: it would update nothing that
    is used, for a divided parameter is another tensor than the model's."""
    groups: Any = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise ValueError(f"the optimizer's factory must return a torch.optim.Optimizer, got {optimizer!r}")
    known = {id(parameter) for parameter in ledger.trainable().values()}
    strange = [p for group in groups for p in group["params"] if id(p) not in known]
    if strange:
        raise ValueError(
            f"the optimizer has {len(strange)} parameters that are not among those the engine trains (first "
            f"shape: {tuple(strange[0].shape)}); build it from the (name, parameter) pairs that its factory "
            "is called with, not from model.parameters()"
        )


def give_norms(optimizer: Any, ledger: Ledger, engine: str) -> None:
    """Let an optimizer whose steps depend on whole parameters read their norms (LAMB has a `measure`) and
    `sizes` from the ledger. Raises ValueError for engines whose parameters only their own library can sum
    over."""
    if not hasattr(optimizer, "measure"):
        return
    if engine in ("torch", "deepspeed"):
        raise ValueError(
            f"{type(optimizer).__name__} scales each step by norms of whole parameters, and engine "
            f"{engine!r} hands the optimizer pieces of its own kind; use engine='fmlab', whose ledger adds "
            "up the pieces, or adamw"
        )
    optimizer.measure = ledger.norms
    optimizer.sizes = {name: math.prod(entry.shape) for name, entry in ledger.entries.items()}


def trainable_names(model: nn.Module) -> set[str]:
    """All names of the parameters that require a gradient now."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
