"""FSDP2 over the blocks of a model: parameters, gradients and optimizer state divided by torch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from fmlab.parallel.layout import Layout


def apply(root: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, layout: Layout) -> None:
    """Divide each block by itself, and what is left together; gradients are summed, not averaged.

    mesh: [shard], or [replica, shard] for hybrid sharding. A parameter that several blocks share must stand
    in one group, or FSDP makes one out of each use and the tie is lost: blocks with a shared one stay whole
    in the root's group.

    What of the states is divided: zero=3 and fsdp all, zero=2 gradients and optimizer state (the parameters
    are kept after the forward pass: reshard_after_forward=False). Plain data parallelism beside another axis
    is a mesh of copies with shards of one rank.
    """
    again = layout.zero == 3 or (layout.fsdp and layout.reshard)
    policy = OffloadPolicy()
    if layout.offload == "parameters":
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": policy}
    shared = _shared(blocks)
    for block in blocks:
        own = {id(parameter) for parameter in block.parameters()}
        if own and not own & shared:
            fully_shard(block, reshard_after_forward=again, **options)
    fully_shard(root, reshard_after_forward=False, **options)
    for module in divided(root):
        # The losses are divided by the global count: nothing is averaged. gloo can only sum, and a factor
        # other than the number of ranks would be a multiplication inside the collective.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def divided(root: nn.Module) -> Iterator[FSDPModule]:
    """The modules that FSDP divides, the root too."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield module


def _shared(blocks: list[nn.Module]) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for block in blocks:
        own = {id(parameter) for parameter in block.parameters()}
        shared |= own & seen
        seen |= own
    return shared
