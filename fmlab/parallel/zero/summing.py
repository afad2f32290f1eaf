"""Stages 1 and 2: gradients are reduce-scattered vector by vector while the backward pass goes on.

Each rank gets the sum of its own slice only, which is half of an all-reduce; the other half, an all-gather,
moves the new weights after the update.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.parallel.ddp.timeline import Event, Kind, Timeline
from fmlab.parallel.zero.owned import Owned
from fmlab.parallel.zero.partition import Flat

IN_FLIGHT = 2  # vectors under way; more would keep more gradients in memory


class Gradients:
    """The gradients of one vector's parameters in one step.

    room:    [size], made when the first of them arrives; None before, and in stage 2 after it was sent
    missing: how many of them the running backward pass has not finished yet
    """

    def __init__(self, flat: Flat, owned: Owned) -> None:
        self.flat, self.owned = flat, owned
        self.room: Tensor | None = None
        self.views: dict[str, Tensor] = {}
        self.missing = 0

    def make_room(self) -> None:
        if self.room is None:
            self.room = torch.empty(self.flat.size, dtype=self.flat.wide, device=self.flat.device)
            self.room[self.flat.numel :].zero_()
            self.views = self.flat.views(self.room)

    def free(self) -> None:
        self.room, self.views = None, {}


class ScatteringReducer:
    """Owns the gradients of whole parameters on one rank, and leaves the sums of the rank's slices.

    The rules are those of ddp.Reducer: every rank sends every vector exactly once a step, in the order of the
    plan, so that ranks whose backward passes differ still agree. Earlier micro-batches add to the same
    memory and send nothing.

    frees: (stage 2) a vector's memory is given back as soon as it was sent. That leaves the own slices, but
    only
           with one micro-batch: with more, whole gradients add up on this rank until the last one.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], owned: Sequence[Owned], frees: bool) -> None:
        self.parameters, self.frees = parameters, frees
        self.vectors = [Gradients(mine.flat, mine) for mine in owned]
        self.used: set[str] = set()
        self.timeline: Timeline | None = None  # set to a Timeline to record the next step
        self._vector_of = {name: vector for vector in self.vectors for name in vector.flat.names}
        self._sent = 0
        self._under_way: list[tuple[Gradients, Tensor, Any]] = []
        self._last = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, name))
            for name, parameter in parameters.items()
        ]

    def start(self) -> None:
        """Begin a step: no gradient is there, nothing is sent."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for vector in self.vectors:
            vector.missing = len(vector.flat.names)
        self.used.clear()
        self._under_way.clear()
        self._sent, self._last = 0, False

    def expect_last_backward(self) -> None:
        """The next backward pass completes the gradients: send each vector when it is full."""
        self._last = True
        self._note("backward")

    # region hook
    def _gradient_ready(self, name: str, parameter: Tensor) -> None:
        """Called by autograd once a backward pass has added all of this parameter's gradient."""
        vector = self._vector_of[name]
        assert parameter.grad is not None
        if name not in self.used:  # the first micro-batch that reaches it
            self.used.add(name)
            vector.make_room()
            vector.views[name].copy_(parameter.grad)
        elif parameter.grad.dtype != vector.flat.wide:
            vector.views[name].add_(parameter.grad)  # bf16 gradients add up in fp32
        same = parameter.dtype == vector.flat.wide  # then autograd adds later micro-batches right there
        parameter.grad = vector.views[name] if same else None
        if not self._last:
            return
        self._note("gradient", self.vectors.index(vector), name)
        vector.missing -= 1
        self._check_not_sent(vector, name)
        while self._sent < len(self.vectors) and self.vectors[self._sent].missing == 0:
            self._send()

    # endregion

    # region send
    def _send(self) -> None:
        """Start the next vector's reduce-scatter and return: the backward pass goes on meanwhile."""
        vector = self.vectors[self._sent]
        vector.make_room()
        for name in set(vector.flat.names) - self.used:  # this rank adds nothing to them
            vector.views[name].zero_()
        self._note("sent", self._sent)
        self._sent += 1
        room = vector.room
        assert room is not None
        own = room.new_empty(vector.flat.length)
        self._under_way.append((vector, own, self.reduce_scatter(vector.flat, own, room)))
        if self.frees:
            for name in vector.flat.names:
                self.parameters[name].grad = None
            vector.free()  # until the message has left, its sender still holds the memory
        while len(self._under_way) > IN_FLIGHT:
            self._arrive()

    # endregion

    def reduce_scatter(self, flat: Flat, own: Tensor, vector: Tensor) -> Any:
        """Leave the sum over ranks of this rank's slice of `vector` in `own`; returns what to wait for."""
        return flat.axis.reduce_scatter_into(own, vector, async_op=not flat.axis.ours)

    # region arrive
    def _arrive(self) -> None:
        vector, own, work = self._under_way.pop(0)
        if work is not None:
            work.wait()
        if vector.room is not None:  # stage 1: the sum replaces what this rank had added to it
            vector.room[vector.flat.own] = own
            own = vector.room[vector.flat.own]
        vector.owned.add(own)

    # endregion

    def finish(self) -> None:
        """Send what the backward pass left over, and wait until all sums of the own slices are here."""
        self._note("backward done")
        while self._sent < len(self.vectors):
            self._send()
        while self._under_way:
            self._arrive()
        for parameter in self.parameters.values():
            parameter.grad = None  # from here on the ledger's pieces have the gradients
        self.timeline = None

    def close(self) -> None:
        """Remove the hooks and give up the gradients."""
        for handle in self._handles:
            handle.remove()
        for vector in self.vectors:
            vector.free()

    def _check_not_sent(self, vector: Gradients, name: str) -> None:
        if vector.missing < 0:
            raise RuntimeError(
                f"the gradient of {name!r} came twice in one backward pass, the second time after it may "
                "have been sent. Reentrant activation checkpointing does that: use "
                "checkpoint(..., use_reentrant=False)"
            )

    def _note(self, kind: Kind, vector: int = -1, parameter: str = "") -> None:
        if self.timeline is not None:
            self.timeline.events.append(Event(kind, time.perf_counter(), vector, parameter))
