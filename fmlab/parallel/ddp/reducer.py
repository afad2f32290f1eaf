"""Gradient hooks that all-reduce a bucket as soon as it is full, while the backward pass goes on."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmlab.parallel.ddp.buckets import Bucket, make_buckets
from fmlab.parallel.ddp.timeline import Event, Kind, Timeline


class Reducer:
    """Owns the gradients of one model on one rank.

    The first gradient of a step is copied into its bucket and `.grad` becomes a view of that: autograd
    adds later micro-batches straight into what is sent, and nothing is copied back afterwards. (To zero
    the bucket first and let autograd add from the start reads and writes every gradient once more, which
    was 5 % of a step on a CPU.) Use: `start`, backward passes (`expect_last_backward` before the last
    one), `finish`.

    Every rank sends every bucket exactly once a step, in the order of the plan. So ranks whose backward
    passes differ (another branch, a parameter that is not used, no data at all) still agree on every
    collective.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Any, bucket_bytes: float) -> None:
        self.parameters = dict(parameters)
        self.group = group
        self.buckets = make_buckets(self.parameters, bucket_bytes)
        self.timeline: Timeline | None = None  # set to a Timeline to record the next step
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.views}
        self._used: set[str] = set()
        self._work: list[Any] = []  # one for each bucket sent in this step
        self._arrivals: list[Any] = []  # notes of their arrival, while a timeline is recorded
        self._last = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, name))
            for name, parameter in self.parameters.items()
        ]

    def start(self) -> None:
        """Begin a step: no gradient is there, nothing is sent."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for bucket in self.buckets:
            bucket.pending = len(bucket.views)
        self._used.clear()
        self._work, self._arrivals = [], []
        self._last = False

    def expect_last_backward(self) -> None:
        """The next backward pass completes the gradients: send each bucket when it is full."""
        self._last = True
        self._note("backward")

    # region hook
    def _gradient_ready(self, name: str, parameter: Tensor) -> None:
        """Called by autograd once a backward pass has added all of this parameter's gradient.

        A tied weight gets here once too: autograd has summed its uses before.
        """
        bucket = self._bucket_of[name]
        if name not in self._used:  # the first micro-batch that reaches it
            self._used.add(name)
            assert parameter.grad is not None
            bucket.views[name].copy_(parameter.grad)
            parameter.grad = bucket.views[name]
        if not self._last:
            return  # an earlier micro-batch: keep adding locally
        self._note("gradient", bucket.index, name)
        bucket.pending -= 1
        self._check_not_sent(bucket, name)
        while len(self._work) < len(self.buckets) and self.buckets[len(self._work)].pending == 0:
            self._send(self.buckets[len(self._work)])  # in the order of the plan, the same on every rank

    # endregion

    # region send
    def _send(self, bucket: Bucket) -> None:
        """Start the all-reduce and return at once: the backward pass goes on meanwhile."""
        self._note("sent", bucket.index)
        work = self.all_reduce(bucket.flat)
        self._work.append(work)
        if self.timeline is not None and work is not None:
            self._arrivals.append(work.get_future().then(lambda _: self._note("arrived", bucket.index)))

    def all_reduce(self, flat: Tensor) -> Any:
        """Sum `flat` over the ranks, in place, without waiting; returns what can be waited for."""
        return dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self.group, async_op=True)

    # endregion

    # region finish
    def finish(self, sums: Tensor) -> Tensor:
        """Send what the backward pass left over, wait for everything, and return `sums` over the ranks.

        A parameter that no rank used in this step has no gradient, as on one device: its `.grad` is None, and
        the optimizer leaves it alone. To know that, the ranks add up which parameters they used; the losses
        travel in the same message.
        """
        self._note("backward done")
        for bucket in self.buckets[len(self._work) :]:
            for name in bucket.views.keys() - self._used:  # this rank adds nothing to them
                bucket.views[name].zero_()
                self.parameters[name].grad = bucket.views[name]
            self._send(bucket)
        used = torch.tensor([float(name in self._used) for name in self.parameters]).to(sums)
        message = torch.cat([sums, used])
        dist.all_reduce(message, group=self.group)
        for work in (*self._work, *self._arrivals):
            if work is not None:
                work.wait()
        self.timeline = None
        for name, ranks in zip(self.parameters, message[len(sums) :].tolist(), strict=True):
            if ranks == 0:
                self.parameters[name].grad = None
        return message[: len(sums)]

    # endregion

    def close(self) -> None:
        """Remove the hooks and give up the gradients."""
        for handle in self._handles:
            handle.remove()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _check_not_sent(self, bucket: Bucket, name: str) -> None:
        if bucket.index < len(self._work) or bucket.pending < 0:
            raise RuntimeError(
                f"the gradient of {name!r} came twice in one backward pass, the second time after its bucket "
                "was full. Reentrant activation checkpointing does that: use "
                "checkpoint(..., use_reentrant=False)"
            )

    def _note(self, kind: Kind, bucket: int = -1, parameter: str = "") -> None:
        if self.timeline is not None:
            self.timeline.events.append(Event(kind, time.perf_counter(), bucket, parameter))
