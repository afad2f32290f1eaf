"""torch's DistributedDataParallel under the engine contract."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fmlab.parallel.ddp.replicated import Replicated
from fmlab.parallel.layout import Batch


class TorchDataParallel(Replicated):
    """Data parallelism by torch.nn.parallel.DistributedDataParallel.

    DDP divides the sum of the ranks' gradients by their number; the loss is multiplied by it beforehand, so
    that the result is the plain sum. What DDP wraps is the whole computation of the loss, so that a rank
    without a target can take part with a loss of zero.
    """

    name = "torch"

    def __init__(self, *args: Any, search_unused: bool = True, **kwargs: Any) -> None:
        """search_unused: look in the graph of each step for parameters that take no part, as DDP waits for
        the gradient of each. Without it a step is a little faster, and wrong where there are some."""
        super().__init__(*args, **kwargs)
        self.search_unused = search_unused
        self._used: set[str] = set()
        self._ranks = dist.get_world_size(self.group)
        self._in_order = False
        with warnings.catch_warnings():
            # torch 2.13 deprecates a name whose replacement older versions do not know
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            self.ddp = DistributedDataParallel(
                _Loss(self),
                process_group=self.group,
                bucket_cap_mb=self.layout.bucket_mb,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # the engine has made them equal
            )

    # region accumulate
    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        if not self._in_order:
            self._fix_order(counts)
        self.optimizer.zero_grad(set_to_none=True)
        self._used = set()
        sums = self._zero_sums()
        batches: list[Batch | None] = [*self._with_targets(micro_batches)] or [None]
        for i, batch in enumerate(batches):
            with nullcontext() if i == len(batches) - 1 else self.ddp.no_sync():
                share, of_batch = self.ddp(batch, counts)
                (share * self._ranks).backward()  # undoes DDP's division by the number of ranks
            sums += of_batch
        return self._sum_losses_and_use(sums)

    # endregion

    def _fix_order(self, counts: Mapping[str, int]) -> None:
        """A backward pass over zeros, before the first step of a process.

        DDP deals gradients out to its buckets anew after its first backward pass, in the order in which they
        arrived. From four ranks on a sum's last bit depends on its place in a bucket, so that a resumed run,
        whose first step is another, would end with other bits.
        """
        self._in_order = True
        nothing, _ = self.ddp(None, counts)
        nothing.backward()

    def close(self) -> None:
        super().close()
        self.ddp.reducer._remove_autograd_hooks()
        self.optimizer.zero_grad(set_to_none=True)

    def _sum_losses_and_use(self, sums: Tensor) -> Tensor:
        """Sum over ranks. A parameter that no rank used gets no gradient, as on one device."""
        trainable = self.ledger.trainable()
        used = torch.tensor([float(name in self._used or not self.search_unused) for name in trainable])
        message = self._sum_over_ranks(torch.cat([sums, used.to(sums)]))
        for parameter, ranks in zip(trainable.values(), message[len(sums) :].tolist(), strict=True):
            if ranks == 0:
                parameter.grad = None
        return message[: len(sums)]

    def _touch_unused(self, share: Tensor) -> Tensor:
        """Add zero to the loss for each parameter that is not in its graph, so that DDP sees a gradient."""
        reached = _leaves(share)
        for name, parameter in self.ledger.trainable().items():
            if id(parameter) in reached:
                self._used.add(name)
            else:
                share = share + parameter.flatten()[:0].sum()
        return share


class _Loss(nn.Module):
    """From a batch to its share of the loss, as the module that DDP wraps."""

    def __init__(self, engine: TorchDataParallel) -> None:
        super().__init__()
        self.model = engine.model
        self._engine = [engine]  # in a list, so that nn.Module does not take it for a part of itself

    def forward(self, batch: Batch | None, counts: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        engine = self._engine[0]
        if batch is None:  # this rank has no target
            nothing = engine._zero_sums()
            return engine._touch_unused(nothing[-1]), nothing
        share, of_batch = engine._forward(batch, counts)
        return engine._touch_unused(share) if engine.search_unused else share, of_batch


def _leaves(tensor: Tensor) -> set[int]:
    """Ids of the leaf tensors in the graph of `tensor` that require a gradient."""
    found, seen = set(), set()
    pending = [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        pending += [parent for parent, _ in node.next_functions]
    return found
