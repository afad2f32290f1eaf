"""Expert parallelism: the experts of a mixture are divided among data ranks, and tokens travel to them.

A rank has its own tokens and routes them itself; the router is a copy like all other weights. Of the experts
it holds its part, whose gradient already has the tokens of all ranks that share the experts: it is summed
over the ranks that hold the same experts, and over no others.

    dispatch   how tokens get to their experts and back
    balance    losses over the tokens of all ranks
    cost       what travels
"""

from torch import nn

from fmlab.models.moe import MixtureOfExperts
from fmlab.parallel.build import Build
from fmlab.parallel.expert.balance import count_over_ranks, counting_modules
from fmlab.parallel.expert.dispatch import DispatchCore

__all__ = ["DispatchCore", "apply", "count_over_ranks", "counting_modules"]


# region apply
def apply(build: Build) -> None:
    """Leave this rank's experts in the model, note it in the ledger, and let tokens travel.

    Raises ValueError for a model without experts and a degree that does not divide them.
    """
    axis, ledger = build.mesh.axis("expert"), build.ledger
    plan = build.need_plan("expert parallelism")
    stacked = {name: whole for name, whole in ledger.parameters() if plan.rule(name).kind == "expert"}
    mixtures = [module for module in build.model.modules() if isinstance(module, MixtureOfExperts)]
    _check(build, stacked, mixtures)
    for name, whole in stacked.items():
        rule = plan.rule(name)
        piece = nn.Parameter(rule.shard(whole.detach(), axis.rank, axis.size), whole.requires_grad)
        ledger.cut(name, axis, rule, piece)
        for each in (name, *ledger.entries[name].aliases):
            owner, _, leaf = each.rpartition(".")
            setattr(build.model.get_submodule(owner), leaf, piece)
    for mixture in mixtures:
        mixture.core = DispatchCore(axis)


# endregion


def _check(build: Build, stacked: dict[str, nn.Parameter], mixtures: list[MixtureOfExperts]) -> None:
    degree, name = build.layout.expert, type(build.model).__name__
    if not stacked or not mixtures:
        raise ValueError(f"expert={degree}: {name} has no MixtureOfExperts to divide; leave expert out")
    for name, whole in stacked.items():
        if len(whole) % degree:
            legal = [n for n in range(1, len(whole) + 1) if len(whole) % n == 0]
            raise ValueError(f"expert={degree} does not divide the {len(whole)} of {name}; legal are {legal}")
