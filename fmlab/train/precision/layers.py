"""Which matrices of a model may be brought to few bits: those of its layers, where nearly all work is."""

import re

from torch import nn

from fmlab.models.layers import Linear
from fmlab.train.lora import READ_OUTSIDE


def layer_matrices(model: nn.Module) -> dict[str, Linear]:
    """Name -> each linear layer that computes its product itself.

    Left out: the output matrix (the loss reads it, and it may be the token embedding), routers of experts,
    and whatever another module reads. Embedding, head, norms and attention stay in high precision in
    production too (DeepSeek-V3, arXiv:2412.19437, section 3.3.1).

    Raises ValueError for a model that has none.
    """
    tables = getattr(model, "TOKEN_TABLES", ())
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is Linear
        and name.rpartition(".")[2] not in READ_OUTSIDE
        and not any(re.fullmatch(table, f"{name}.weight") for table in tables)
    }
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layer of fmlab.models.layers to change")
    return found
