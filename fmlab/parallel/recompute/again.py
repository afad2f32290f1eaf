"""Activation checkpointing: keep what a function was given, and compute again what it saved.

Autograd asks a pair of hooks what to keep of each tensor that an operation saves for its backward pass, and
gets it back through them. Ours keep a number in its place. The first tensor that is asked for runs the
function once more, under the same conditions, which saves the same tensors in the same order.

The graph is the one of the first run, so that a parameter gets its gradient once, and as it would without
(Chen et al. 2016, arXiv:1604.06174, is the idea; hooks instead of a nested backward pass are as in
torch.utils.checkpoint with use_reentrant=False).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fmlab.parallel.recompute.conditions import Conditions


def compute_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), of which nothing but the arguments is kept for the backward pass.

    The function must do the same whenever it is called with the same arguments and random numbers; what it
    leaves behind besides its result, it leaves behind twice. Collectives inside run again too.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = Call(function, args, kwargs)
    with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
        return function(*args, **kwargs)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in Python also where torch.compile traces its caller: a graph saves tensors of its own, in
    its own order, behind the hooks' back. fullgraph=True refuses it with this reason.
    """
    return torch.compiler.disable(
        function, reason="recomputation stands in no compiled graph: leave out fullgraph=True or recompute"
    )


class Call:
    """One call whose saved tensors are computed again when the backward pass asks for them.

    nbytes: of the storages that the call would have kept, arguments and parameters apart
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.function = function
        self.conditions = Conditions(tensors[0].device if tensors else torch.device("cpu"))
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._held = _hold(tensors)
        self._count = 0
        self._values: dict[int, Tensor] = {}

    # region hooks
    def pack(self, tensor: Tensor) -> int:
        """In the forward pass: a number instead of the tensor, which can be freed."""
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        """In the backward pass: the tensor, computed again with all others if it is not there."""
        if number not in self._values:
            self._run_again()
        return self._values.pop(number)

    def _run_again(self) -> None:
        seen = 0

        def keep(tensor: Tensor) -> int:
            nonlocal seen
            self._values[seen] = tensor.detach()
            seen += 1
            if seen == self._count:
                raise _AllThere  # what follows saves nothing: the last product need not be computed
            return seen - 1

        args, kwargs = self._arguments()
        try:
            with self.conditions.again(), torch.autograd.graph.saved_tensors_hooks(keep, _never):
                self.function(*args, **kwargs)
        except _AllThere:
            return
        # endregion
        raise RuntimeError(
            f"{_name(self.function)} saved {self._count} tensors for its backward pass the first time and "
            f"{seen} when it was computed again: it depends on something that changed in between"
        )

    def _arguments(self) -> Any:
        leaves = list(self._others)
        for place, tensor in zip(self._places, self._held.saved_tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._spec)


class _AllThere(Exception):
    """Raised out of a function whose saved tensors are all there."""


class _Hold(torch.autograd.Function):
    """Forward: nothing, but the tensors are saved as those of any operation are: counted by a meter, moved
    elsewhere by hooks around us, and refused if someone has written into them since."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("no gradient goes through here")


def _hold(tensors: list[Tensor]) -> Any:
    return _Hold.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn


def _never(number: int) -> Tensor:
    raise AssertionError("the second run has no backward pass of its own")


def _name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    return type(owner).__name__ if owner is not None else getattr(function, "__qualname__", repr(function))
