"""Fine-tuning: which parameters learn, said and counted, and a loop over examples.

All of them, some of them by name (`only_train`), or few new ones: low-rank updates (fmlab.train.lora),
vectors before the input (fmlab.train.adapt_prompt), keys and values in each layer (fmlab.train.adapt_prefix).
The engines train whatever requires a gradient, so that each of these runs under any layout.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from fmlab.data.batch import Batch
from fmlab.parallel import Layout, parallelize
from fmlab.parallel.engine import Objective, StepResult
from fmlab.train.optim import adamw
from fmlab.train.schedule import warmup_cosine


@dataclass(frozen=True)
class Trained:
    """What learns: `names` of the parameters, how many numbers they hold, out of how many in the model.

    A tied parameter is named and counted once.
    """

    names: tuple[str, ...]
    parameters: int
    total: int

    @classmethod
    def of(cls, model: nn.Module) -> "Trained":
        """As the model stands now."""
        learning = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        total = sum(p.numel() for p in model.parameters())
        return cls(tuple(learning), sum(learning.values()), total)

    @property
    def share(self) -> float:
        """The part of the parameters that learns."""
        return self.parameters / self.total

    def __str__(self) -> str:
        tensors = f"{len(self.names)} tensor{'s' if len(self.names) != 1 else ''}"
        return f"{self.parameters:,} of {self.total:,} parameters learn ({self.share:.2%}), in {tensors}"


def only_train(model: nn.Module, patterns: str | Sequence[str] = ".*") -> Trained:
    """Freeze all parameters but those whose name matches one of the patterns (re.fullmatch); what learns.

    A tied parameter learns if any of its names matches. Calls do not add up: each says anew what learns, and
    the default lets everything learn. Raises ValueError for a pattern that matches nothing.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    named = list(model.named_parameters(remove_duplicate=False))
    learning: set[int] = set()
    for pattern in patterns:
        matched = {id(p) for name, p in named if re.fullmatch(pattern, name)}
        if not matched:
            raise ValueError(f"no parameter is called {pattern!r}; there are {shown([n for n, _ in named])}")
        learning |= matched
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in learning)
    return Trained.of(model)


def freeze(model: nn.Module) -> None:
    """Let nothing learn."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


class Batches(Protocol):
    """Where `fine_tune` gets its batches: an ExampleSampler, or any other sampler of fmlab.data."""

    world_size: int

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of a step."""


def fine_tune(
    model: nn.Module,
    sampler: Batches,
    objective: Objective,
    steps: int,
    lr: float = 1e-3,
    warmup: int | None = None,
    weight_decay: float = 0.0,
    clip: float | None = 1.0,
    layout: Layout | None = None,
    engine: str = "fmlab",
    each: Callable[[int, StepResult], None] | None = None,
) -> list[float]:
    """Train what requires a gradient with AdamW, warm-up and cosine; the loss of each step.

    Every rank calls it with its own sampler.

    lr:     of the top of the schedule. What learns from zero (LoRA, prompts) wants about ten times that of
            full fine-tuning.
    warmup: steps; a tenth of them if not given
    layout: one replica on each rank of the sampler if not given
    each:   called after every step with its number, from 1, and its result

    Afterwards the model is in eval mode. Raises ValueError for settings out of range, or when nothing
    requires a gradient.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    warmup = min(max(1, steps // 10), steps - 1) if warmup is None else warmup
    layout = layout or Layout(data=sampler.world_size)
    runner = parallelize(
        model, layout, objective, adamw(lr, weight_decay=weight_decay), engine, max_grad_norm=clip
    )
    losses = []
    model.train()
    try:
        for step in range(steps):
            runner.set_lr(warmup_cosine(step, steps, warmup, lr))
            result = runner.step(micro_batches(sampler.batch(step), layout.micro_batches))
            losses.append(result.loss)
            if each is not None:
                each(step + 1, result)
    finally:
        runner.close()
        model.eval()
    return losses


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """The batch in `count` parts, or as it is."""
    from fmlab.data.sampler import split_micro_batches

    return [batch] if count == 1 else split_micro_batches(batch, count)


def shown(names: Iterable[str], most: int = 6) -> str:
    """Some names, for a message: those of one layer stand for those of all."""
    distinct = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more
