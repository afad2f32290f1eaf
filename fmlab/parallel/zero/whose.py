"""Stage 3 asks of each parameter: which modules hold it, which blocks run it, and what is done with it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from fmlab.parallel.build import Build
from fmlab.parallel.zero.gathering import Owner


def distinct(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks, each once: a model may run one several times."""
    return list({id(block): block for block in blocks}.values())


def owners_of(model: nn.Module) -> dict[int, list[Owner]]:
    """Parameter (by id) -> the modules that hold it, and what they call it."""
    found: dict[int, list[Owner]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, leaf))
    return found


def users_of(blocks: Sequence[nn.Module]) -> dict[int, list[int]]:
    """Module (by id) -> the numbers of the blocks that it is a part of."""
    found: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        for module in block.modules():
            found.setdefault(id(module), []).append(index)
    return found


def grouped_alike(
    parameters: Mapping[str, nn.Parameter], owners: Mapping[int, list[Owner]], build: Build
) -> list[tuple[dict[str, nn.Parameter], bool]]:
    """Groups of one element type, trained or not, with whether autocast rounds them to 16 bits anyway."""
    kinds: dict[tuple[torch.dtype, bool, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        cast = is_cast(name, parameter, [module for module, _ in owners[id(parameter)]], build)
        kinds.setdefault((parameter.dtype, parameter.requires_grad, cast), {})[name] = parameter
    return [(group, cast) for (_, _, cast), group in kinds.items()]


def is_cast(name: str, parameter: nn.Parameter, modules: Sequence[nn.Module], build: Build) -> bool:
    """Whether all that is done with a parameter under the layout's autocast are products in 16 bits.

    So it is with matrices, but for tables that are looked up, and for those that the plan keeps whole (a
    router of experts decides in fp32). Without a plan, only what torch's layers multiply by is known.
    """
    if build.layout.precision != "bf16" or parameter.dtype != torch.float32 or parameter.dim() < 2:
        return False
    if build.plan is None:
        return all(isinstance(module, nn.Linear | nn.modules.conv._ConvNd) for module in modules)
    tables = any(isinstance(module, nn.Embedding) for module in modules)
    return not tables and build.plan.rule(name).kind not in ("vocab", "replicate")
