"""Which gradients travel together.

One all-reduce for each gradient pays the latency hundreds of times; one for all of them can start only
when the backward pass is over. Buckets are the middle. Parameters are taken in reverse order of
registration, which is roughly the order in which the backward pass reaches them (Li et al., PyTorch
Distributed, VLDB 2020, section 3.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Bucket:
    """A flat tensor that holds the gradients of some parameters, each of which has a view into it.

    flat:    [n], all gradients of the bucket one after the other; what is all-reduced
    views:   parameter name -> its part of `flat`, in the shape of the parameter
    pending: how many of these gradients the running backward pass has not finished yet
    """

    index: int
    flat: Tensor
    views: dict[str, Tensor] = field(default_factory=dict)
    pending: int = 0

    @property
    def bytes(self) -> int:
        """Payload of the bucket's all-reduce."""
        return self.flat.numel() * self.flat.element_size()


# region plan
def plan_buckets(parameters: Mapping[str, nn.Parameter], bucket_bytes: float) -> list[list[str]]:
    """Parameter names by bucket, in the order in which the buckets are sent.

    A bucket is closed when the next gradient would lift it over `bucket_bytes` or has another element type or
    device. A gradient larger than that has a bucket of its own.
    """
    plan: list[list[str]] = []
    size, kind = 0, None
    for name, parameter in reversed(list(parameters.items())):
        more = parameter.numel() * parameter.element_size()
        if not plan or size + more > bucket_bytes or kind != (parameter.dtype, parameter.device):
            plan.append([])
            size, kind = 0, (parameter.dtype, parameter.device)
        plan[-1].append(name)
        size += more
    return plan


# endregion


def make_buckets(parameters: Mapping[str, nn.Parameter], bucket_bytes: float) -> list[Bucket]:
    """Allocate the flat gradients and cut the views."""
    buckets = []
    for index, names in enumerate(plan_buckets(parameters, bucket_bytes)):
        first = parameters[names[0]]
        total = sum(parameters[name].numel() for name in names)
        bucket = Bucket(index, torch.zeros(total, dtype=first.dtype, device=first.device))
        start = 0
        for name in names:
            parameter = parameters[name]
            part = bucket.flat[start : start + parameter.numel()]
            bucket.views[name] = part.view_as(parameter)
            start += parameter.numel()
        buckets.append(bucket)
    return buckets
