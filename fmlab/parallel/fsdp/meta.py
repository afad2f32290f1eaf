"""A model larger than any rank could hold: built without memory, filled shard by shard.

    with torch.device("meta"):
        model = GPT.from_preset("gpt3-175b")
    engine = parallelize(model, Layout(data=1024, fsdp=True), ...)

Every rank draws one parameter after the other, whole, keeps its rows and forgets the rest: at most its shards
and one parameter are in memory at once. The numbers depend on the first rank's seed and on names, not on how
many ranks there are: `fmlab.models.initial.initialise(model, seed)` gives them to one device.
"""

import torch
from torch import nn

from fmlab.models.initial import InitialValues
from fmlab.parallel.layout import Layout
from fmlab.parallel.mesh import Axis


def is_on_meta(model: nn.Module) -> bool:
    """Whether the model has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def check_meta(model: nn.Module, layout: Layout) -> None:
    """Raise ValueError where a model on the meta device cannot be filled."""
    if not layout.fsdp:
        raise ValueError(
            f"the model is on the meta device, and {layout} would need all of it on each rank; "
            "Layout(fsdp=True) fills it shard by shard, or build it on a real device"
        )
    real = [name for name, p in model.named_parameters() if not p.is_meta]
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if real:
        raise ValueError(f"a part of the model is on the meta device, but not {', '.join(real[:3])}")
    if lost:
        raise ValueError(f"buffers on the meta device have no value: {', '.join(lost[:3])}; build them real")


def first_values(model: nn.Module, world: Axis) -> InitialValues | None:
    """What the parameters of a model on the meta device begin with, from the first rank's seed."""
    if not is_on_meta(model):
        return None
    return InitialValues(model, world.gather_objects(torch.initial_seed())[0])
