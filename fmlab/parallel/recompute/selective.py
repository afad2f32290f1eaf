"""Selective recomputation: the inside of attention."""

import warnings
from typing import Any

from torch import Tensor, nn

from fmlab.meter import saved_activations
from fmlab.models.attention.core import AttentionCore
from fmlab.models.attention.latent import LatentAttention
from fmlab.models.layers import GroupedAttention, SelfAttention
from fmlab.parallel.recompute.again import compute_again, uncompiled
from fmlab.parallel.recompute.conditions import Conditions

_WORTH = 0.25  # of the bytes of attention's result: a fused core keeps less than that besides its arguments


class CoreAgain:
    """An attention core that is computed again in the backward pass, if that frees anything.

    A core that keeps its tables [b,h,q,s] (an added bias, dropout, no fused kernel) does so: the 5as^2b bytes
    of Korthikanti et al. A fused core keeps a number a query, and runs as it is.
    """

    def __init__(self, core: AttentionCore) -> None:
        self.core = core
        #: Bytes that the first call freed; None before.
        self.freed: int | None = None
        self._worth = True
        self._run = uncompiled(self._again)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Tensor:
        """See AttentionCore."""
        mixed: Tensor = self._run(query, key, value, *args, **settings)
        return mixed

    def _again(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Any:
        if self.freed is None and query.requires_grad and query.numel():
            self._measure(query, key, value, *args, **settings)
        if not self._worth:
            return self.core(query, key, value, *args, **settings)
        return compute_again(self.core, query, key, value, *args, **settings)

    def _measure(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> None:
        tensors = [x for x in (query, key, value, *args, *settings.values()) if isinstance(x, Tensor)]
        with Conditions(query.device).again(), saved_activations(exclude=tensors) as kept:
            mixed = self.core(query, key, value, *args, **settings)
        own = mixed.untyped_storage().nbytes()
        self.freed = max(0, kept.peak - own)  # the result stays in any case: the next matrix keeps it
        self._worth = self.freed > _WORTH * own
        if not self._worth:
            warnings.warn(
                f"recompute='selective' frees nothing here: this attention keeps {self.freed:,} bytes "
                "besides its arguments and its result, because it is fused; it is not computed again",
                stacklevel=2,
            )


def attention_modules(model: nn.Module) -> list[Any]:
    """The layers with an attention core. Raises ValueError if there is none."""
    kinds = (SelfAttention, GroupedAttention, LatentAttention)
    found = [module for module in model.modules() if isinstance(module, kinds)]
    if not found:
        raise ValueError(
            f"recompute='selective' computes the inside of attention again, and {type(model).__name__} has "
            "no attention of fmlab.models.layers; use recompute='full'"
        )
    return found
