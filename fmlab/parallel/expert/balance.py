"""The balance of experts over the tokens of all ranks.

The balance loss is a product of two means: how often each expert is chosen, and how probable it is. Of a
batch on several ranks it is not the mean of the ranks' losses, and a rank that sees one kind of text would
be told to use all experts for it (Qiu et al. 2025, arXiv:2501.11873, section 3). But it is linear in the
probabilities, and the choices have no gradient. So with the choices counted over all ranks, each rank's
probabilities give its part of the loss of the whole batch, and its gradient, without another message.
"""

from functools import partial
from typing import Any

from torch import nn

from fmlab.models.moe import count_alone
from fmlab.parallel.build import Build


# region count
def count_over_ranks(build: Build) -> bool:
    """Let each module that weighs experts by `counts_of_all` count over the ranks that share a batch.

    Returns whether there are such: then every rank must make the same number of passes.
    """
    axis = build.mesh.axis("context", "data")
    counting = counting_modules(build.model) if axis.size > 1 else []
    for module in counting:
        module.counts_of_all = lambda counts: axis.all_reduce_(counts.clone())
        build.at_close.append(partial(setattr, module, "counts_of_all", count_alone))
    return bool(counting)


# endregion


def counting_modules(model: nn.Module) -> list[Any]:
    """The modules whose loss depends on the choices of all tokens."""
    return [module for module in model.modules() if hasattr(module, "counts_of_all")]
