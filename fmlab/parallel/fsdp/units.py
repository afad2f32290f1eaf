"""Which parameters come and go together."""

from torch import nn


# region units
def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that become units: the model's blocks, or for a model without such a list the elements of
    its outermost module lists."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.ModuleList | nn.Sequential):
        return list(blocks)
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found


def homes_of(model: nn.Module, blocks: list[nn.Module]) -> dict[int, int]:
    """Parameter (by id) -> the one block that owns it, or -1 for the root: owned by none or by several."""
    inside = [{id(module) for module in block.modules()} for block in blocks]
    homes: dict[int, int] = {}
    for module in model.modules():
        places = [i for i, modules in enumerate(inside) if id(module) in modules]
        place = places[0] if len(places) == 1 else -1
        for parameter in module.parameters(recurse=False):
            known = homes.setdefault(id(parameter), place)
            homes[id(parameter)] = place if place == known else -1
    return homes


# endregion
