"""Context parallelism: each sequence is divided among ranks, attention included.

Everything but attention treats each position by itself, so a rank simply has fewer of them. Attention needs
the keys and values of all: they go round (`ring`), or heads are exchanged for positions (`ulysses`). Weights
are whole on every rank, so gradients are summed over the context ranks as over those of the data axis.

    positions   which columns of a sequence a rank has, and how much work that makes
    cut         a rank's part of a micro-batch
    mask        who may look at whom, over all ranks
    tile        a part of attention, and how parts are put together
    cost        what travels
"""

from functools import partial

from torch import nn

from fmlab.models.layers import GroupedAttention, SelfAttention
from fmlab.parallel.build import Build
from fmlab.parallel.context.cut import SequenceCut
from fmlab.parallel.context.ring import RingCore
from fmlab.parallel.context.ulysses import UlyssesCore, check_heads

__all__ = ["RingCore", "SequenceCut", "UlyssesCore", "apply"]


# region apply
def apply(build: Build) -> None:
    """Give every attention a core that spans the ranks, and cut the micro-batches.

    Raises ValueError for a model that cannot be cut along its sequences.
    """
    layout, axis = build.layout, build.mesh.axis("context")
    plan = build.need_plan("context parallelism")
    attentions = attention_modules(build.model)
    _check(build, attentions)
    ulysses = layout.context_method == "ulysses"
    for attention in attentions:
        alone = attention.core
        build.at_close.append(partial(setattr, attention, "core", alone))
        attention.core = UlyssesCore(axis, alone) if ulysses else RingCore(axis, layout.context_balance)
    balance = "none" if ulysses else layout.context_balance
    build.batch_steps.append(SequenceCut(build.model, plan, build.objective, axis, balance))


# endregion


def attention_modules(model: nn.Module) -> list[SelfAttention | GroupedAttention]:
    """The layers that mix positions."""
    return [module for module in model.modules() if isinstance(module, (SelfAttention, GroupedAttention))]


def uncut(model: object) -> str:
    """Why a model cannot be divided along its sequences, whose plan names nothing that can."""
    return (
        f"{type(model).__name__} cannot be divided along its sequences: its parallel plan names no inputs "
        "that may be cut (ParallelPlan.sequence). A model can be if, outside SelfAttention and "
        "GroupedAttention, each position is treated by itself: no recurrence or convolution over it, no bias "
        "from a table of positions, no second stream, no scaling by the length of the text; use context=1"
    )


def _check(build: Build, attentions: list[SelfAttention | GroupedAttention]) -> None:
    plan = build.need_plan("context parallelism")
    if not plan.sequence or not attentions:
        raise ValueError(f"{build.layout}: {uncut(build.model)}")
    if build.layout.context_method == "ulysses":
        for attention in attentions:
            check_heads(*heads(attention), build.layout.context)
    whole = getattr(build.objective, "whole_batch", False)
    if whole or any(isinstance(part, nn.Module) for part in vars(build.objective).values()):
        raise ValueError(
            f"{build.layout}: {type(build.objective).__name__} compares whole sequences or runs another "
            "model on them, and context parallelism leaves each rank a part; use context=1"
        )


def heads(attention: SelfAttention | GroupedAttention) -> tuple[int, int]:
    """(query heads, key/value heads), read from the weights: they may be a tensor-parallel rank's share."""
    k = attention.head_size
    if isinstance(attention, SelfAttention):
        n = attention.qkv.weight.shape[0] // (3 * k)
        return n, n
    return attention.query.weight.shape[0] // k, attention.key_value.weight.shape[0] // (2 * k)
