"""The whole model again, from one that a layout has divided among ranks.

    model = whole_model(engine, lambda: GPT(config))    # every rank calls it; then generate, export

A divided model computes what the undivided one does only inside its engine's step: a pipeline's rank has a
stage of it, a context-parallel rank expects its part of each sequence. What reads a model from outside
(generation, evaluation, files in Hugging Face's format) takes a whole one.
"""

from collections.abc import Callable

import torch
from torch import nn

from fmlab.parallel import Engine, Layout
from fmlab.parallel.state import buffers


def is_divided(layout: Layout, engine: str = "fmlab") -> bool:
    """Whether the ranks of this layout hold something else than whole parameters. torch's engine runs ZeRO 2
    by FSDP, whose parameters are divided between steps."""
    cut = layout.tensor * layout.context * layout.expert * layout.pipeline > 1
    return cut or layout.zero >= (2 if engine == "torch" else 3) or layout.fsdp


@torch.no_grad()
def whole_model(engine: Engine, build: Callable[[], nn.Module]) -> nn.Module:
    """An undivided model with the engine's weights now, on its device, in eval mode; every rank calls it.

    build: makes the undivided model; which weights it starts from does not matter.

    Raises ValueError when it makes another model than the engine's.
    """
    weights = engine.full_params()
    model = engine.backend.to_device(build())
    own = dict(model.named_parameters())
    if unlike := sorted(
        name for name in own.keys() | weights.keys() if _shape(own, name) != _shape(weights, name)
    ):
        raise ValueError(
            f"this is not the engine's model: {', '.join(unlike[:5])} are missing or of another shape"
        )
    for name, parameter in own.items():
        parameter.copy_(weights[name])
    divided = buffers(engine.model)
    for name, buffer in buffers(model).items():
        if name in divided and divided[name].shape == buffer.shape:
            buffer.copy_(divided[name])
    return model.eval()


def _shape(tensors: dict[str, torch.Tensor] | dict[str, nn.Parameter], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
