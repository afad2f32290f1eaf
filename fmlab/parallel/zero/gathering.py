"""Stage 3: parameters that are whole only while a block needs them, forward and backward.

Forward: before a block runs, all ranks give each other their slices (an all-gather), and its modules see
whole tensors; behind it these are given up. What autograd would save of them for the backward pass is noted
instead.

Backward: they are gathered again, and once the block's gradients are there, these are summed over the ranks,
each of which keeps its slice (a reduce-scatter).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from fmlab.parallel.zero.owned import Owned

Owner = tuple[nn.Module, str]  # a module, and what it calls the parameter
Hook = Callable[[Any], Any] | None


class Gathered:
    """One vector of parameters in stage 3, of which this rank holds a slice.

    users:  which blocks use it, in order; -1 is the model itself, outside of its blocks
    source: [length], the slice that is sent, in the parameters' type; None where the host's master copy is
            brought to the device each time (offload of parameters)
    whole:  [size] while gathered, else None
    cast:   whether these are matrices that autocast would round anyway: then they are sent rounded, and what
            autograd notes is a part of the vector instead of 16-bit copies that would stay
    """

    def __init__(
        self,
        owned: Owned,
        source: Tensor | None,
        users: tuple[int, ...],
        owners: dict[str, list[Owner]],
        cast: bool = False,
    ) -> None:
        self.owned, self.flat, self.source, self.users, self.owners = owned, owned.flat, source, users, owners
        self.cast, self.dtype = cast, owned.flat.dtype
        self.whole: Tensor | None = None
        self._coming: tuple[Tensor, Any] | None = None
        self.agree: Callable[[Gathered, str], None] | None = None  # tells the other ranks what comes next
        self._list_again()

    def choose_dtype(self) -> None:
        """In a forward pass: decide in which type to gather, for its backward pass too."""
        kind = self.flat.device.type
        rounded = self.cast and torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind) if rounded else self.flat.dtype

    # region gather
    @torch.no_grad()
    def prefetch(self) -> None:
        """Begin to gather, and return."""
        if self.whole is not None or self._coming is not None:
            return
        if self.agree is not None:
            self.agree(self, "gathers")
        own = self.owned.master if self.source is None else self.source
        own = own.to(self.flat.device, self.dtype)
        whole = own.new_empty(self.flat.size)
        self._coming = whole, self.all_gather(whole, own)

    def all_gather(self, whole: Tensor, own: Tensor) -> Any:
        """Fill `whole` with every rank's slice; returns what to wait for."""
        return self.flat.axis.all_gather_into(whole, own, async_op=not self.flat.axis.ours)

    def gather(self) -> Tensor:
        """The whole vector [size], gathered if it is not here."""
        if self.whole is None:
            self.prefetch()
            assert self._coming is not None
            whole, work = self._coming
            if work is not None:
                work.wait()
            self.whole, self._coming = whole, None
        return self.whole

    def free(self) -> None:
        """Let go of the whole vector."""
        self.whole = self._coming = None

    # endregion

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Let the modules see these tensors, one for each parameter, where they look for their own."""
        for name, tensor in zip(self.flat.names, tensors, strict=True):
            for module, leaf in self.owners[name]:
                vars(module)[leaf] = tensor  # found before a registered parameter of that name
        self._list_again()

    def hide(self) -> None:
        """Let the modules see placeholders again."""
        for owners in self.owners.values():
            for module, leaf in owners:
                vars(module).pop(leaf, None)
        self._list_again()

    def _list_again(self) -> None:
        """torch's recurrent layers keep their weights in a list beside, which must hold what is shown."""
        for owners in self.owners.values():
            for module, _ in owners:
                if isinstance(module, nn.RNNBase):
                    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]

    @property
    def shown(self) -> bool:
        module, leaf = next(iter(self.owners.values()))[0]
        return leaf in vars(module)

    def views(self) -> list[Tensor]:
        """The whole parameters, gathered; new tensors over the same memory, without a history."""
        return [view.data for view in self.flat.views(self.gather()).values()]


# region whole
class _GatherForwardScatterBackward(torch.autograd.Function):
    """Forward: whole parameters from all ranks' slices, and an anchor. Backward: the sum of their gradients
    over the ranks, to each rank its slice.

    The anchor is tied to what the block returns: so the backward pass comes here even if it reaches none of
    the parameters, and a rank never leaves the others waiting.
    """

    @staticmethod
    def forward(
        ctx: Any, trigger: Tensor, vector: Gathered, scatter: Callable[..., None]
    ) -> tuple[Tensor, ...]:
        ctx.vector, ctx.scatter = vector, scatter
        ctx.set_materialize_grads(False)
        return (torch.zeros_like(trigger), *vector.views())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.scatter(ctx.vector, gradients)
        return None, None, None


# endregion


# region enter
class _PassForwardEnterBackward(torch.autograd.Function):
    """Forward: nothing, to what a block returns. Backward: the block's backward pass begins, so gather."""

    @staticmethod
    def forward(ctx: Any, enter: Callable[[], None], anchors: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.enter = enter
        ctx.anchor = [torch.zeros_like(anchor) for anchor in tensors[:anchors]]
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors[anchors:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.enter()
        return None, None, *ctx.anchor, *gradients


# endregion


def gather_forward_scatter_backward(
    trigger: Tensor, vector: Gathered, scatter: Callable[[Gathered, Sequence[Tensor | None]], None]
) -> tuple[Tensor, list[Tensor]]:
    """(anchor [], the whole parameters of `vector`). trigger: [], any tensor that requires a gradient."""
    anchor, *tensors = _GatherForwardScatterBackward.apply(trigger, vector, scatter)
    return anchor, tensors


def pass_forward_enter_backward(
    enter: Callable[[], None], anchors: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """`tensors`; `enter` is called when the backward pass has all their gradients."""
    return list(_PassForwardEnterBackward.apply(enter, len(anchors), *anchors, *tensors))


class Noted(NamedTuple):
    """A view into a gathered vector, without its numbers."""

    vector: Gathered
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any


class NotedViews:
    """For autograd's saved tensors: of a gathered vector it saves which part it was, of others the tensor.

    torch asks one pair of such hooks at a time. Those of an enclosing block (a meter, a move to the host)
    would see nothing of what runs in here, so they are asked for all tensors that are not ours.
    """

    def __init__(self) -> None:
        self._vectors: dict[int, Gathered] = {}  # by storage, while they are whole

    def hooks(self) -> saved_tensors_hooks:
        """The context for what runs in a block."""
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return saved_tensors_hooks(
            partial(self.pack, around and around[0]), partial(self.unpack, around and around[1])
        )

    def watch(self, vector: Gathered) -> None:
        self._vectors[_storage(vector.gather())] = vector

    def forget(self, vector: Gathered) -> None:
        if vector.whole is not None:
            self._vectors.pop(_storage(vector.whole), None)

    # region pack
    def pack(self, around: Hook, tensor: Tensor) -> Any:
        vector = self._vectors.get(_storage(tensor)) if self._vectors else None
        if vector is not None:
            return Noted(vector, tensor.shape, tensor.stride(), tensor.storage_offset())
        return around(tensor) if around else tensor.detach()  # with its history it would hold itself

    def unpack(self, around: Hook, saved: Any) -> Tensor:
        if isinstance(saved, Noted):
            return saved.vector.gather().as_strided(saved.shape, saved.stride, saved.offset)
        found: Tensor = around(saved) if around else saved
        return found

    # endregion


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
