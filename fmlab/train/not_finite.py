"""Where a step first met a number that is not finite: it is run again, watched module by module."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from fmlab.parallel import Engine
from fmlab.parallel.layout import Batch
from fmlab.parallel.state import gather

#: What was found, the likeliest cause first.
_WEIGHT, _OUTPUT, _INPUT, _GRADIENT, _SUM = range(5)
Found = tuple[int, str]


def first_not_finite(engine: Engine, micro_batches: Sequence[Batch]) -> str:
    """Run the step of these micro-batches again, without an update, and say which tensor went wrong first and
    on which rank; the same sentence on every rank, all of which call it.

    The caller puts seed and step number back as they were before the step. DeepSpeed's engine makes its
    update: a run ends after this.
    """
    here = _weights(engine) or _watched(engine, micro_batches)
    every = [(*found, rank) for rank, found in enumerate(gather(here, engine.ranks)) if found is not None]
    if not every:
        return (
            "when the step was run again, every module's output and gradient was finite: look at the "
            "objective, or at what does not come again"
        )
    _, what, rank = min(every, key=lambda found: (found[0], found[2]))
    others = f" (and something on {len(every) - 1} other)" if len(every) > 1 else ""
    return f"first on rank {rank}: {what} is not finite{others}"


def _weights(engine: Engine) -> Found | None:
    for name, parameter in engine.ledger.parameters():
        if not _finite(parameter.detach()):
            return _WEIGHT, f"the weight {name}"
    return None


# region watched
def _watched(engine: Engine, micro_batches: Sequence[Batch]) -> Found | None:
    found: list[Found] = []
    with ExitStack() as hooks:
        for name, module in engine.model.named_modules():
            shown = name or type(module).__name__
            hooks.enter_context(module.register_forward_pre_hook(partial(_before, found, shown)))
            hooks.enter_context(module.register_forward_hook(partial(_after, found, shown)))
        engine.loss_limit = -math.inf  # so that no update is made
        engine.step(micro_batches)
    if found:
        return found[0]
    for name, gradient in engine.ledger.gradients().items():
        if not _finite(gradient.detach()):
            return _SUM, f"the gradient of {name}"
    return None


def _before(found: list[Found], name: str, module: nn.Module, args: Any) -> None:
    """Numbers that no module made: between two modules, or by another stage of a pipeline."""
    if not found and any(tensor.isnan().any() for tensor in _tensors(args)):  # masks hold infinities
        found.append((_INPUT, f"the input of {name}"))


def _after(found: list[Found], name: str, module: nn.Module, args: Any, output: Any) -> None:
    plain = isinstance(output, Tensor)
    for tensor in _tensors(output):
        if not found and (not _finite(tensor) if plain else bool(tensor.isnan().any())):
            found.append((_OUTPUT, f"the output of {name}"))
        if tensor.requires_grad:
            tensor.register_hook(partial(_backward, found, name))


def _backward(found: list[Found], name: str, gradient: Tensor) -> None:
    if not found and not _finite(gradient):
        found.append((_GRADIENT, f"the gradient of the output of {name}"))


# endregion


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of real numbers in what a module takes or gives."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        yield from _tensors(vars(value))
