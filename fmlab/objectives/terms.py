"""Loss terms as (sum, count, weight), so that the mean is taken once, over everything that was summed.

A mean of means is wrong as soon as ranks or micro-batches hold different numbers of targets. So an
objective never divides: it returns sums and counts, the engine adds the counts of all ranks and
micro-batches, and `total_loss` divides by that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Term:
    """One summand of the loss.

    sum:    fp32 scalar, differentiable: the loss added up over the targets of this batch
    count:  int64 scalar: how many targets were added up
    weight: factor of this term in the total loss
    """

    sum: Tensor
    count: Tensor
    weight: float = 1.0


LossTerms = dict[str, Term]


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise ValueError for a weight below 0."""
    wrong = {name: weight for name, weight in weights.items() if not weight >= 0}
    if wrong:
        raise ValueError(f"weights of loss terms must be 0 or more, got {wrong}")


def total_loss(terms: LossTerms, global_counts: Mapping[str, Tensor | int]) -> Tensor:
    """This batch's share of the loss: the sum over terms of weight * sum / global count.

    Adding the result over all micro-batches and ranks gives the mean loss over all targets. A term
    whose global count is 0 contributes 0.

    Raises ValueError when a term has no global count, or when there are no terms.
    """
    if not terms:
        raise ValueError("an objective must return at least one loss term, got none")
    missing = sorted(set(terms) - set(global_counts))
    if missing:
        raise ValueError(
            f"no global count for the loss terms {missing}; counts given: {sorted(global_counts)}"
        )
    shares = []
    for name, term in terms.items():
        count = torch.as_tensor(global_counts[name], device=term.sum.device)
        share = term.weight * term.sum / count.clamp(min=1)
        shares.append(torch.where(count > 0, share, torch.zeros_like(share)))
    return torch.stack(shares).sum()
