"""Where a tensor-parallel rank talks to the others, put into an undivided block's modules as hooks.

A region is a child of a block whose matrices are divided (attention, a feed-forward network, an embedding).
What enters it is whole on every rank, what leaves it is a partial sum. So the forward pass adds up what
leaves, and the backward pass adds up the gradient of what enters (Shoeybi et al. 2019, arXiv:1909.08053,
section 3). With sequence parallelism a rank keeps its share of the positions between regions: what enters is
gathered along the sequence and what leaves is reduce-scattered, and backward the other way round
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

No message is sent: `send(collective, tensor)` is told of each. Shapes: b batch, l positions, d width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.plan import ParallelPlan
from fmlab.models.state import State

Send = Callable[[str, Tensor], None]  # (collective, the whole tensor)


class _SumGradient(torch.autograd.Function):
    """Forward: nothing. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Send) -> Tensor:
        ctx.send = send
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.send("all_reduce", gradient)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Forward: all-reduce, in place. Backward: nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Send) -> Tensor:
        send("all_reduce", x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Forward: all-gather along `dim`. Backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Send, dim: int, ranks: int) -> Tensor:
        ctx.send, ctx.dim, ctx.ranks = send, dim, ranks
        whole = x.new_empty([size * ranks if i == dim else size for i, size in enumerate(x.shape)])
        send("all_gather", whole)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.send("reduce_scatter", gradient)
        return _share(gradient, ctx.dim, ctx.ranks), None, None, None


class _Scatter(torch.autograd.Function):
    """Forward: reduce-scatter along `dim`, or only take a share of what all have. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Send, dim: int, ranks: int, add: bool) -> Tensor:
        ctx.send, ctx.dim, ctx.ranks = send, dim, ranks
        if add:
            send("reduce_scatter", x)
        return _share(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        whole = gradient.new_empty(
            [size * ctx.ranks if i == ctx.dim else size for i, size in enumerate(gradient.shape)]
        )
        ctx.send("all_gather", whole)
        return whole, None, None, None, None


def _share(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([size // ranks if i == dim else size for i, size in enumerate(x.shape)])


class Regions:
    """Hooks of one block's regions.

    send: told of each message; ranks: of the tensor group; sequence: whether sequence parallelism is on.
    """

    def __init__(self, send: Send, ranks: int, sequence: bool) -> None:
        self.send, self.ranks, self.sequence = send, ranks, sequence
        self._numbers = count()
        self.gathered: WeakKeyDictionary[torch.UntypedStorage, tuple[Tensor, int]] = WeakKeyDictionary()

    def watch(self, block: nn.Module, prefix: str, plan: ParallelPlan) -> None:
        """Put hooks on the children of `block` that the plan divides."""
        if self.ranks == 1:
            return
        for child_name, child in block.named_children():
            names = (f"{prefix}.{child_name}.{name}" for name, _ in child.named_parameters())
            kinds = {plan.rule(name).kind for name in names}
            if not kinds & {"column", "row", "vocab", "head"}:
                continue
            child.register_forward_pre_hook(self._enter, with_kwargs=True)
            if "row" in kinds or (kinds == {"vocab"} and isinstance(child, nn.Embedding)):
                child.register_forward_hook(self._leave if "row" in kinds else self._look_up)

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(map(self.enter, args)), {name: self.enter(value) for name, value in kwargs.items()}

    def enter(self, x: Any, dim: int = 1) -> Any:
        """What a region sees of activations [b,l,d] (or [n,d] with dim 0); anything else is left as it is."""
        active = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == dim + 2
        if not active or self.ranks == 1:
            return x
        if not self.sequence:
            return _SumGradient.apply(x, self.send)
        gathered: Tensor = _Gather.apply(x, self.send, dim, self.ranks)
        self.gathered[gathered.untyped_storage()] = (x.detach(), next(self._numbers))
        return gathered

    def _leave(self, _: nn.Module, args: Any, partial: Tensor) -> Tensor:
        if self.sequence:
            return _Scatter.apply(partial, self.send, 1, self.ranks, True)
        return _Sum.apply(partial, self.send)

    def _look_up(self, _: nn.Module, args: Any, partial: Tensor) -> Tensor:
        return _Sum.apply(partial, self.send)  # positions are added to whole sequences; `spread` divides them

    def spread(self, state: State, names: tuple[str, ...]) -> State:
        """After an embedding block: with sequence parallelism each rank goes on with its share [b,l/t,d]."""
        if not self.sequence:
            return state
        wide = {name: state[name] for name in names if name in state and state[name].is_floating_point()}
        return state.updated(
            **{n: _Scatter.apply(x, self.send, 1, self.ranks, False) for n, x in wide.items() if x.dim() == 3}
        )

    @contextmanager
    def keeping_shares(self) -> Iterator[None]:
        """Autograd keeps a rank's share of what was gathered, and gathers it again in the backward pass."""
        again: set[int] = set()  # matrices side by side share one message

        def pack(tensor: Tensor) -> Any:
            kept = self.gathered.get(tensor.untyped_storage())
            return tensor if kept is None else (*kept, tensor.shape, tensor.stride())

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            share, number, shape, stride = kept
            whole = share.new_empty(share.numel() * self.ranks)
            if number not in again:
                again.add(number)
                self.send("all_gather", whole)
            return whole.as_strided(shape, stride)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if self.sequence else _nothing():
            yield

    def cross_entropy(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """linear_cross_entropy whose rows of `weight` [v/t,d] are a rank's share; `hidden` is [n,d]."""
        loss = linear_cross_entropy(self.enter(hidden, dim=0), weight, labels, bias)
        if self.ranks > 1:  # the largest logit, the sum of exponentials and the target's logit of each row
            for _ in range(3):
                self.send("all_reduce", labels.new_empty(labels.shape, dtype=torch.float32))
        return loss


@contextmanager
def _nothing() -> Iterator[None]:
    yield
