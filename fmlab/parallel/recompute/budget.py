"""Recomputation by budget: which layers may keep what they made, measured on the first micro-batch.

Layers compete for the bytes that may be kept. One that is computed again costs its forward operations and
still keeps what goes into it, so those come first that save most operations for a byte; of equal ones the
last, whose memory is free again before an earlier layer is computed a second time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.meter import flops, saved_activations
from fmlab.models.state import State
from fmlab.parallel.layout import Layout
from fmlab.parallel.mesh import Mesh
from fmlab.parallel.recompute.again import compute_again, uncompiled
from fmlab.parallel.recompute.conditions import Conditions


@dataclass(frozen=True)
class LayerCost:
    """One layer and micro-batch, measured.

    kept:  bytes kept for the backward pass, what goes in included
    input: bytes kept if it is computed again: what goes in
    flops: operations of its forward pass
    """

    kept: int
    input: int
    flops: int


# region choose
def choose(costs: Mapping[int, LayerCost], budget: float) -> list[int]:
    """The layers that keep everything, such that no more than `budget` bytes are kept.

    budget: whole number of bytes, or as a float the share of what would be kept without recomputation.

    Raises ValueError if it is too small even with every layer computed again.
    """
    limit = budget * sum(cost.kept for cost in costs.values()) if isinstance(budget, float) else budget
    used = sum(cost.input for cost in costs.values())
    if used > limit:
        everything = sum(cost.kept for cost in costs.values())
        raise ValueError(
            f"activation_budget={budget!r} allows {limit:,.0f} bytes, and what goes into the layers is "
            f"{used:,} bytes: give at least that, or a share of {used / max(everything, 1):.3f}"
        )

    def worth(number: int) -> tuple[float, int]:
        cost = costs[number]
        return cost.flops / max(cost.kept - cost.input, 1), number

    keep = []
    for number in sorted(costs, key=worth, reverse=True):
        more = max(0, costs[number].kept - costs[number].input)
        if used + more <= limit:
            used += more
            keep.append(number)
    return sorted(keep)


# endregion


class Budget:
    """Measures the layers of this rank and chooses; ranks that talk inside a layer choose the same."""

    def __init__(self, layout: Layout, mesh: Mesh) -> None:
        assert layout.activation_budget is not None
        self.allowed = layout.activation_budget
        self._ranks = mesh.axis("tensor", "context", "data")  # all but the other stages of a pipeline
        #: What was measured, by block; of the rank with the most bytes, once it is settled.
        self.costs: dict[int, LayerCost] = {}
        #: Blocks that keep everything; None until it is settled, when all are computed again.
        self.keep: list[int] | None = None

    def settle(self, step: int) -> None:
        """Choose, at the beginning of the first step after some rank has measured."""
        if self.keep is not None:
            return
        every = self._ranks.gather_objects(self.costs)
        if not any(every):
            return
        numbers = sorted(set().union(*every))
        self.costs = {
            number: max((costs[number] for costs in every if number in costs), key=lambda c: c.kept)
            for number in numbers
        }
        self.keep = choose(self.costs, self.allowed)

    def again(self, number: int) -> bool:
        """Whether a block is computed again."""
        return self.keep is None or number not in self.keep


class BudgetedLayer:
    """A block's forward pass, measured when it first has rows, and computed again if the budget says so."""

    def __init__(self, block: nn.Module, number: int, budget: Budget) -> None:
        self.forward, self.number, self.budget = block.forward, number, budget
        self.reads: tuple[str, ...] = getattr(block, "reads", ())
        self._run = uncompiled(self._again)

    @property
    def again(self) -> bool:
        """Whether it is computed again, as things stand."""
        return self.budget.again(self.number)

    def __call__(self, state: State) -> Any:
        return self._run(state)

    def _again(self, state: State) -> Any:
        if torch.is_grad_enabled() and self.budget.keep is None and self.number not in self.budget.costs:
            self._measure(state)
        return compute_again(self.forward, state) if self.again else self.forward(state)

    def _measure(self, state: State) -> None:
        tensors = [state[name] for name in self.reads if name in state]
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        if not inputs or not all(tensor.numel() for tensor in inputs):
            return
        given = [tensor for tensor in state.values() if not tensor.requires_grad]
        with Conditions(inputs[0].device).again(), saved_activations(exclude=given) as kept, flops() as work:
            result = self.forward(state)
        del result
        nbytes = _nbytes(inputs)
        self.budget.costs[self.number] = LayerCost(max(kept.peak, nbytes), nbytes, work.total)


def _nbytes(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
