"""A stage of a pipeline as production engines want it: a module from tensors to tensors, our blocks inside.

What blocks before the cut have written and blocks behind it read is sent, as a tuple. All else a stage makes
itself from the micro-batch, which every rank has. The loss is computed inside the last stage, so that any
objective works.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.models.state import Block, State, live_names
from fmlab.objectives import LossTerms, total_loss


class _Enough(Exception):
    """The stage has what it sends on; the objective need not go on."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.tensors = tensors


class Stage(nn.Module):
    """Some blocks of the model: received tensors and a micro-batch in, tensors for the next stage out; the
    last one gives its share of the loss []."""

    def __init__(self, engine: Any, blocks: Sequence[Block], start: int, stop: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks[start:stop])
        self.receives, self.sends = sent_at(blocks, start), sent_at(blocks, stop)
        self.last = stop == len(blocks)
        self._engine = [engine]  # in a list, so that nn.Module does not take it for a part of itself
        self.counts: Mapping[str, int] = {}
        self.sums: list[Tensor] = []

    # region stage
    def forward(self, *received: Tensor, **batch: Tensor) -> Any:
        engine = self._engine[0]
        for tensor in received:
            if tensor.requires_grad:  # sent back as it lies in memory
                tensor.register_hook(torch.Tensor.contiguous)

        def model(*args: Any, **kwargs: Any) -> State:
            state = engine.model.prepare(*args, **kwargs)
            state = state.updated(**dict(zip(self.receives, received, strict=True)))
            for block in self.blocks:
                state = block(state)
            if self.last:
                return state
            raise _Enough(tuple(_sendable(state[name], received) for name in self.sends))

        try:
            with engine.backend.autocast(engine.layout.precision):
                terms = engine.objective(model, batch)
        except _Enough as enough:
            return enough.tensors
        return self._share(terms)

    # endregion

    def _share(self, terms: LossTerms) -> Tensor:
        share = total_loss(terms, self.counts)
        sums = [terms[name].sum.detach() for name in self._engine[0]._terms]
        self.sums.append(torch.stack([*sums, share.detach()]))
        return share


def _sendable(tensor: Tensor, received: tuple[Tensor, ...]) -> Tensor:
    """torch cuts outputs off their graph in place and sends them as they lie in memory: they must be neither
    views nor inputs passed through, and contiguous."""
    through = any(tensor is other for other in received)
    copied = tensor.clone() if through or tensor._is_view() else tensor
    return copied.contiguous()


def sent_at(blocks: Sequence[Block], cut: int) -> list[str]:
    """The names that a pipeline sends at a cut: what blocks before it write and blocks after it read."""
    written = {name for block in blocks[:cut] for name in block.writes}
    return [name for name in live_names(blocks, cut) if name in written]
