"""The loss on text that was not trained on, over any number of ranks, each token counted once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.backends import Backend
from fmlab.data.batch import Batch
from fmlab.parallel.engine import Objective
from fmlab.train.launch import World


@dataclass(frozen=True)
class Evaluation:
    """loss: mean over `count` targets of all ranks (nats a token for language models)."""

    loss: float
    count: int

    @property
    def perplexity(self) -> float:
        """exp(loss): as uncertain as a choice between so many tokens."""
        return math.exp(self.loss)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    objective: Objective,
    backend: Backend,
    precision: Any = "fp32",
    world: World | None = None,
) -> Evaluation:
    """Mean loss of `model` over the batches of all ranks; every rank calls it with its own batches.

    The sums are added up in fp64. The model is in eval mode meanwhile. An objective may name another one that
    it is judged by: a distilled student by its own loss, without its teacher. Raises ValueError without a
    target.
    """
    objective = getattr(objective, "judged", objective)
    world = world or World()
    was_training = model.training
    model.eval()
    sums: dict[str, Tensor] = {}  # of each term: weighted loss, count
    for batch in batches:
        with backend.step():
            with backend.autocast(precision):
                terms = objective(model, backend.to_device(batch))
            for name, term in terms.items():
                values = torch.stack([term.weight * term.sum, term.count]).double()
                sums[name] = sums[name] + values if name in sums else values
    model.train(was_training)
    over_ranks = [world.sum(values).tolist() for values in sums.values()]
    if not any(count for _, count in over_ranks):
        raise ValueError("there is nothing to evaluate: no batch has a target")
    loss = sum(total / max(count, 1) for total, count in over_ranks)
    return Evaluation(loss, int(over_ranks[0][1]))
