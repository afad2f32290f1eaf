"""Activation recomputation: what the forward pass made is forgotten and made again for the backward pass.

    full        whole layers, from what goes into them: one more forward pass (Chen et al. 2016,
                arXiv:1604.06174)
    selective   attention's inside only, whose tables grow with the square of the length but take few
                operations (Korthikanti et al. 2022, arXiv:2205.05198, section 5)
    budget      as few layers as make the others fit, by measured bytes and operations

The gradients are bitwise those without recomputation: random numbers, autocast and dropout masks are as they
were. Embedding and output layer are left alone; what they keep is a table's gradient, which is needed anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fmlab.models.plan import ParallelPlan
from fmlab.parallel.build import Build
from fmlab.parallel.recompute.again import compute_again, uncompiled
from fmlab.parallel.recompute.budget import Budget, BudgetedLayer, LayerCost, choose
from fmlab.parallel.recompute.selective import CoreAgain, attention_modules

__all__ = ["Budget", "LayerAgain", "LayerCost", "apply", "choose", "compute_again", "layers_of", "recomputed"]


# region apply
def apply(build: Build) -> None:
    """Let the model compute again what `layout.recompute` says.

    Raises ValueError for a model without what is to be computed again.
    """
    kind, model = build.layout.recompute, build.model
    if kind == "selective":
        for module in attention_modules(model):
            _replace(build, module, "core", CoreAgain(module.core))
        return
    layers = layers_of(model, build.plan)
    if kind == "full":
        for block in layers.values():
            _replace(build, block, "forward", LayerAgain(block.forward))
        return
    budget = Budget(build.layout, build.mesh)
    for number, block in layers.items():
        _replace(build, block, "forward", BudgetedLayer(block, number, budget))
    build.before_step.append(budget.settle)


# endregion


class LayerAgain:
    """A block's forward pass, computed again in the backward pass."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self._again = uncompiled(compute_again)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._again(self.forward, *args, **kwargs)


def layers_of(model: nn.Module, plan: ParallelPlan | None) -> dict[int, Any]:
    """The blocks between embedding and output: those without a table over the vocabulary, and not the last.

    Raises ValueError for a model without any.
    """
    blocks: Sequence[nn.Module] = getattr(model, "blocks", ())
    found = {
        number: block
        for number, block in enumerate(blocks)
        if number < len(blocks) - 1 and not (plan and _has_table(block, number, plan))
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layers to compute again: recomputation needs a model whose "
            "`blocks` (nn.ModuleList) stand between an embedding and an output layer"
        )
    return found


def _has_table(block: nn.Module, number: int, plan: ParallelPlan) -> bool:
    names = [f"blocks.{number}.{name}" for name, _ in block.named_parameters()]
    return any(plan.rule(name).kind == "vocab" for name in names)


def recomputed(model: nn.Module) -> list[int]:
    """Numbers of the blocks that are computed again, as things stand."""
    blocks: Sequence[Any] = getattr(model, "blocks", ())
    return [number for number, block in enumerate(blocks) if _again(vars(block).get("forward"))]


def _again(forward: Any) -> bool:
    return isinstance(forward, LayerAgain) or (isinstance(forward, BudgetedLayer) and forward.again)


def _replace(build: Build, owner: Any, name: str, new: Any) -> None:
    """Set an attribute until the engine lets go of the model."""
    missing = name not in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, new)
    build.at_close.append(lambda: delattr(owner, name) if missing else setattr(owner, name, old))
