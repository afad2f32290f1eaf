"""Activation checkpointing by torch.utils.checkpoint."""

from functools import partial
from typing import Any, cast

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply(model: nn.Module, recompute: str) -> None:
    """ "full": whole layers (blocks with an attention core) are computed again in the backward pass;
    "selective": what is inside attention (Korthikanti et al. 2022, arXiv:2205.05198, section 5)."""
    if recompute == "none":
        return
    for block in cast(nn.ModuleList, model.blocks):
        cores: list[Any] = [module for module in block.modules() if hasattr(module, "core")]
        if recompute == "full" and cores:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        elif recompute == "selective":
            for module in cores:
                module.core = partial(checkpoint, module.core, use_reentrant=False)
