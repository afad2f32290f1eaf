"""When a unit's parameters are gathered, given back, and its gradients sent: hooks around its module.

    forward:   [gather] -> the module -> [give back]         meanwhile the next unit's parameters arrive
    backward:  [gather] -> its backward pass -> [send the gradients, give back]      the one before's arrive

Forward hooks do the first line. The second needs two points in autograd's graph, put there by two functions
that compute nothing: one on what leaves the module, which the backward pass meets before the module's own
part of the graph, one on what enters it, which it meets after.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fmlab.parallel.fsdp.messages import Unit


@dataclass
class Pass:
    """One forward pass of the model; `open` counts the calls of each unit that wait for their backward."""

    open: dict[int, int] = field(default_factory=dict)


@dataclass
class Call:
    """One call of a unit with gradients. previous: the call before it in the same forward pass, if any."""

    unit: Unit
    within: Pass
    previous: "Call | None"


# region functions
class _NothingForwardGatherBackward(torch.autograd.Function):
    """On what leaves a unit: before gradients enter its backward pass, its parameters must be there."""

    @staticmethod
    def forward(ctx: Any, gather: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gather = gather
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.gather()
        return None, *gradients


class _NothingForwardReduceBackward(torch.autograd.Function):
    """On what enters a unit: when gradients leave its backward pass, those of its parameters are complete."""

    @staticmethod
    def forward(ctx: Any, reduce: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.reduce()
        return None, *gradients


# endregion


def _through(function: Any, action: Callable[[], None], values: Any) -> tuple[Any, bool]:
    """`values`, with all tensors in it that carry gradients passed through `function`; and were there any?

    A tensor that stands in several places stays one tensor: so its gradients add up in the same order as on
    one device.
    """
    leaves, structure = tree_flatten(values)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
    if not tensors:
        return values, False
    passed = dict(zip(tensors, function.apply(action, *tensors.values()), strict=True))
    return tree_unflatten([passed.get(id(leaf), leaf) for leaf in leaves], structure), True


def _in_backward() -> bool:
    """Whether this thread is inside a backward pass: what runs forward there is a recomputation."""
    return bool(torch._C._current_graph_task_id() >= 0)


class Schedule:
    """Drives the units of one model. The units call in the order of `units` where nothing else is known."""

    def __init__(self, units: list[Unit], reshard: bool, prefetch: int) -> None:
        """reshard: give parameters back after each pass, or keep them until the step ends. prefetch: how many
        units arrive ahead of their use."""
        self.units, self.reshard, self.prefetch = units, reshard, prefetch
        self._running: dict[int, Call | None] = {}  # unit -> the call whose module is running
        self._entered: list[Call] = []  # calls whose backward pass has begun and not ended
        self._pass: Pass | None = None  # while the whole model runs
        self._last: Call | None = None
        self._told = -1  # the backward pass that will say when it ends

    def attach(self, unit: Unit, module: nn.Module) -> list[Any]:
        """Put the hooks on; returns handles that take them off."""
        return [
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._before_forward(unit, args, kwargs), with_kwargs=True
            ),
            module.register_forward_hook(lambda _, __, output: self._after_forward(unit, output)),
        ]

    def begin(self) -> None:
        """A step begins: nothing of an earlier one, which may have failed, is left."""
        self._running.clear()
        self._entered.clear()
        self._pass = self._last = None
        self._told = -1
        for unit in self.units:
            unit.in_backward = 0

    def enter_model(self) -> None:
        """The model's own forward begins: its calls are of one pass."""
        if not _in_backward():
            self._pass, self._last = Pass(), None

    def leave_model(self) -> None:
        """It is over."""
        if not _in_backward():
            self._pass = None

    # region forward
    def _before_forward(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        if unit.in_backward:
            return None  # computed again inside its own backward pass: all is there
        unit.gather()
        for following in self.units[unit.index + 1 : unit.index + 1 + self.prefetch]:
            following.expect()
        self._running[unit.index] = None
        if not torch.is_grad_enabled() or _in_backward():
            return None
        call = Call(unit, self._pass or Pass(), self._last if self._pass else None)
        self._running[unit.index] = call
        (args, kwargs), _ = _through(
            _NothingForwardReduceBackward, lambda: self._after_backward(call), (args, kwargs)
        )
        return args, kwargs

    def _after_forward(self, unit: Unit, output: Any) -> Any:
        if unit.in_backward:
            return None
        call, waits = self._running.pop(unit.index, None), False
        if call is not None:
            output, waits = _through(
                _NothingForwardGatherBackward, lambda: self._before_backward(call), output
            )
        if waits and call is not None:
            call.within.open[unit.index] = call.within.open.get(unit.index, 0) + 1
            self._last = call
        last = waits and unit is self.units[-1]  # its backward pass comes next
        if not last and (self.reshard or not waits):
            unit.free()
        return output

    # endregion

    # region backward
    def _before_backward(self, call: Call) -> None:
        call.unit.in_backward += 1
        self._entered.append(call)
        call.unit.gather()
        earlier = call.previous
        for _ in range(self.prefetch):
            if earlier is not None:
                earlier.unit.expect()
                earlier = earlier.previous
        if self._told != torch._C._current_graph_task_id():
            self._told = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _after_backward(self, call: Call) -> None:
        if call not in self._entered:
            return  # nothing of this call was differentiated
        self._entered.remove(call)
        unit = call.unit
        unit.in_backward -= 1
        call.within.open[unit.index] -= 1
        if not call.within.open[unit.index]:  # else its parameters collect gradients of further calls first
            unit.reduce()
        if self.reshard and not unit.in_backward:
            unit.free()  # else kept until the step ends

    def _backward_ends(self) -> None:
        """What entered some units has no gradient (token numbers): they are done only now."""
        for call in list(self._entered):
            self._after_backward(call)

    # endregion
