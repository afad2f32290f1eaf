"""Sequence parallelism: between the matrices each rank has its part of the positions only.

Norms, dropout and residual sums treat each position by itself, so t ranks that hold the whole stream do the
same work t times and keep t copies. Where a plan says that blocks treat a stream so (`Stream`), it is split
before the first of them, and the matrices inside gather it and scatter their sums (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2). The gradient of what every rank applies to its own positions (norms, biases
of row matrices) is then one summand.

Lengths that the ranks do not divide are padded with zeros, which no matrix ever sees.

Shapes: b batch, l positions, p = ceil(l / t) of one rank, d hidden width.
"""

from collections.abc import Callable

from torch import Tensor, nn

from fmlab.models.cross_entropy import IGNORE
from fmlab.models.plan import Stream
from fmlab.models.state import State
from fmlab.parallel.dropout import holding_part
from fmlab.parallel.mesh import Axis
from fmlab.parallel.tensor.functions import gather_forward_split_backward, split_forward_gather_backward


class Positions:
    """How many positions the stream has that the block now running has a part of."""

    length: int = 0


# region cut
class CutStream:
    """Runs a block's forward on this rank's positions of a stream; splits it before and joins it behind, if
    the block is the first or the last of those that treat each position by itself."""

    def __init__(
        self, block: nn.Module, stream: Stream, axis: Axis, positions: Positions, first: bool, last: bool
    ) -> None:
        self.run: Callable[[State], State] = block.forward
        self.stream, self.axis, self.positions = stream, axis, positions
        self.first, self.last = first, last
        self.learns = hasattr(block, "cross_entropy")
        #: How the stream is joined; by f, if only matrices cut by columns read it afterwards.
        self.join = gather_forward_split_backward

    def __call__(self, state: State) -> State:
        name = self.stream.name
        length = self.positions.length = self._length(state)
        state.derived[f"{name} positions"] = length  # masks and biases are between all of them
        if self.first:
            state = state.updated(**{name: split_forward_gather_backward(state[name], self.axis, 1)})
        if self.learns and "labels" in state:
            result = self._run(state.updated(labels=in_order_of_ranks(state.labels, self.axis.size)))
            return result.updated(labels=state.labels)
        state = self._run(state)
        if self.last:
            whole = self.join(state[name], self.axis, 1, length)
            state = state.updated(**{name: whole})
            del state.derived[f"{name} positions"]
        return state

    # endregion

    def _run(self, state: State) -> State:
        with holding_part(self.positions.length, self.axis.rank, self.axis.size):  # dropout's masks
            return self.run(state)

    def _length(self, state: State) -> int:
        if state.cache is not None or "last" in state.derived:
            raise ValueError(
                "sequence_parallel divides the positions of a whole text, and a generation has one at a "
                "time; generate under a layout with sequence_parallel=False"
            )
        length: int = state[self.stream.like].shape[1]
        return length


def in_order_of_ranks(labels_bl: Tensor, ranks: int) -> Tensor:
    """Labels in the order in which the ranks' positions, each [b,p] in one list, come one after the other.

    [b,l] -> [t,b,p], -100 where positions are padded.
    """
    missing = -labels_bl.shape[1] % ranks
    filled = nn.functional.pad(labels_bl, [0, missing], value=IGNORE)
    return filled.unflatten(1, (ranks, -1)).transpose(0, 1)
