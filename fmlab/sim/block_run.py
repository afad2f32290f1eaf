"""Forward and backward passes of one block on shapes, recorded."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from fmlab.models.state import Block, State
from fmlab.sim.cores import FusedDropout
from fmlab.sim.program import BlockTrace, Pass
from fmlab.sim.recorder import Recorder
from fmlab.sim.regions import Regions
from fmlab.sim.split import Split

Outputs = dict[str, tuple[tuple[int, ...], torch.dtype]]


class BlockRun:
    """One block, with everything that it needs as leaves; inside the recorder's context.

    spread: names of its results that sequence parallelism divides after it
    again:  forward keeps nothing but the result; backward makes the rest again
    """

    def __init__(
        self,
        block: Block,
        state: State,
        split: Split,
        recorder: Recorder,
        regions: Regions,
        spread: tuple[str, ...] = (),
        again: bool = False,
    ) -> None:
        self.block, self.split, self.recorder, self.regions = block, split, recorder, regions
        self.spread, self.again = spread, again
        self.state = state.only(block.reads)
        try:
            with torch.no_grad():  # makes what layers share (masks, rotary angles), and touches the weights
                self._forward()
        except (RuntimeError, NotImplementedError) as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Raise a ValueError in words for what a trace on shapes or a division cannot do."""
        name, reason = type(self.block).__name__, str(error).splitlines()[0]
        if "meta" in str(error):
            raise ValueError(
                f"a dry run cannot follow {name}: what it does depends on the values of its inputs, and "
                f"there are only shapes ({reason})"
            ) from error
        if self.split.sequence_parallel:
            raise ValueError(
                f"sequence_parallel: {name} works something out from the length of what it gets, which is "
                f"a share of the positions here; leave it off ({reason})"
            ) from error

    def _forward(self) -> dict[str, Tensor]:
        leaves = {
            name: x.detach().requires_grad_() if x.is_floating_point() else x
            for name, x in self.state.items()
        }
        state = State(leaves, derived=self.state.derived)
        with self.regions.keeping_shares(), FusedDropout():
            after = self.regions.spread(self.block(state), self.spread)
        return {name: after[name] for name in self.block.writes if name in after}

    def trace(self) -> tuple[BlockTrace, Outputs]:
        """Run it: forward, and backward as for the first and for a later micro-batch."""
        forward, saved, outputs = self._forward_pass()
        shapes = {name: (tuple(x.shape), x.dtype) for name, x in outputs.items()}
        result = sum(size_of(x) for x in outputs.values() if x.dim())
        del outputs
        first, later = self._backward_pass(first=True), self._backward_pass(first=False)
        return BlockTrace(type(self.block).__name__, forward, first, later, saved, result), shapes

    def _forward_pass(self) -> tuple[Pass, int, dict[str, Tensor]]:
        mark = self.recorder.mark()
        with torch.set_grad_enabled(not self.again):
            outputs = self._forward()
        events, peak, _ = self.recorder.since(mark, "forward")
        return Pass(events, peak), self.recorder.live - mark.live, outputs

    def _backward_pass(self, first: bool) -> Pass:
        weights = list(self.block.parameters())
        sums = {id(w): torch.empty_like(w, dtype=self.split.gradient_dtype) for w in weights}
        handles = [w.register_post_accumulate_grad_hook(_collect(sums, first)) for w in weights]
        try:
            return self._recorded_backward()
        finally:
            for handle in handles:
                handle.remove()

    def _recorded_backward(self) -> Pass:
        """From the forward pass on where that is part of it; else from behind it."""
        begin = self.recorder.mark()
        with self.recorder.making_again():
            outputs = self._forward()
        if not self.again:
            begin = self.recorder.mark()
        roots = [x for x in outputs.values() if x.requires_grad]
        gradients = [empty(tuple(x.shape), x.dtype) for x in roots]  # free: the block behind has made them
        del outputs
        torch.autograd.backward(roots, gradients)
        events, peak, again = self.recorder.since(begin, "backward")
        incoming = sum(size_of(x) for x in gradients)
        return Pass(events, peak - incoming, again)


def _collect(sums: dict[int, Tensor], first: bool) -> Callable[[Tensor], None]:
    """What becomes of a weight's gradient: the first one is the sum so far, later ones are added to it."""

    def collect(parameter: Tensor) -> None:
        gradient, parameter.grad = cast(Tensor, parameter.grad), None
        total = sums[id(parameter)]
        if not first:
            total.add_(gradient)
        elif gradient.dtype != total.dtype:
            total.copy_(gradient)

    return collect


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of shape alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.itemsize
