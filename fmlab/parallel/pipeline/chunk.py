"""One chunk of the model as the objective sees it, and what is kept of a micro-batch until it comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from fmlab.models.state import State
from fmlab.parallel.pipeline.split_backward import SplitBackward, edge_of
from fmlab.parallel.pipeline.stages import Chunk


class Ended(BaseException):
    """Ends a call of the objective behind a chunk that is not the last; no `except Exception` catches it."""

    def __init__(self, state: State) -> None:
        self.state = state


class StandIn:
    """Called by the objective in place of the model: runs one chunk of it."""

    def __init__(
        self, model: Any, chunk: Chunk, received: Mapping[str, Tensor], notes: Mapping[str, int]
    ) -> None:
        self._model, self._chunk, self._received, self._notes = model, chunk, received, notes
        self._called = False
        #: What the first block of the model made: where the gradients of inputs end on the first chunk.
        self.made_first: list[GradientEdge] = []

    # region chunk
    def __call__(self, *args: Any, **kwargs: Any) -> State:
        if self._called:
            raise ValueError(
                "the objective calls the model twice for a micro-batch, which a pipeline cannot do"
            )
        self._called = True
        state: State = self._model.prepare(*args, **kwargs)
        state = state.updated(**self._received)
        state.derived.update(self._notes)
        for index in self._chunk.blocks:
            block = self._model.blocks[index]
            state = block(state)
            if index == 0:
                made = (state[name] for name in block.writes if name in state)
                self.made_first = [edge_of(tensor) for tensor in made if tensor.requires_grad]
        if self._chunk.blocks.stop < len(self._model.blocks):
            raise Ended(state)
        return state

    # endregion

    def check_called(self) -> None:
        """Raise ValueError if the objective has ended without the model: other stages would wait for it."""
        if not self._called:
            raise ValueError("the objective does not call the model, so that there is nothing to pipeline")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass
class InFlight:
    """A micro-batch in a chunk between its forward pass and its last backward pass.

    inputs:    leaves that came in and need a gradient
    outputs:   where the gradients of what went out enter the graph
    ends:      where a backward pass for inputs only stops
    gradients: of the outputs, on the last chunk, where the loss begins the backward pass
    """

    inputs: list[Tensor]
    outputs: list[GradientEdge]
    ends: list[GradientEdge]
    gradients: list[Tensor] | None = None
    split: SplitBackward | None = None

    @property
    def held(self) -> int:
        """Bytes that came in, and gradients that wait."""
        waiting = self.split.held if self.split is not None else 0
        return sum(t.numel() * t.element_size() for t in self.inputs) + waiting
