"""Ulysses: heads are exchanged for positions (Jacobs et al. 2023, arXiv:2309.14509).

Between layers a rank has all heads of its columns. Around attention an all-to-all gives it some heads of all
columns, so that any attention runs there as on one device, and another one brings the result back. Messages
shrink with the number of ranks, but there can be no more ranks than heads.

Shapes: b batch, h query heads, g key/value heads, n ranks, l columns of this rank, k head width.
"""

import torch
from torch import Tensor

from fmlab.models.attention import AttentionCore, AttentionMask, sdpa_core
from fmlab.models.dropout import Numbers, current_masks, holding
from fmlab.parallel.context.mask import refuse, stacked
from fmlab.parallel.exchange import exchange_forward_exchange_backward
from fmlab.parallel.mesh import Axis


class UlyssesCore:
    """An AttentionCore that runs `core` on some heads of whole sequences.

    Each rank of `axis` has a chunk of the columns, in the order of the ranks.
    """

    def __init__(self, axis: Axis, core: AttentionCore = sdpa_core) -> None:
        self.axis, self.core = axis, core

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        dropout: float = 0.0,
        *,
        scale: float | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See AttentionCore; `mask` describes this rank's columns only. Raises ValueError for what it cannot.

        Every rank of the axis calls it, with the same shapes.
        """
        refuse(query, key, mask, dropout, bias)
        h, g = query.shape[1], key.shape[1]
        check_heads(h, g, self.axis.size)
        if g < self.axis.size:  # several ranks share a key/value head: each gets a copy
            copies = self.axis.size // g
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        query, key, value = (heads_to_columns(x, self.axis) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        with holding(**self._held()):
            mixed = self.core(query, key, value, whole_mask(mask, self.axis), dropout, scale=scale)
        return columns_to_heads(mixed, self.axis)

    def _held(self) -> dict[str, Numbers]:
        """What dropout must know: inside, a rank has all columns, and a chunk of the heads it has outside."""
        masks, rank, ranks = current_masks(), self.axis.rank, self.axis.size
        outside: Numbers = range if masks is None else masks.numbers.get("h", range)
        return {"q": range, "s": range, "h": lambda n: outside(n * ranks)[rank * n : (rank + 1) * n]}


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError unless the heads can be divided, or key/value heads be copied, evenly."""

    def fits(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(ranks):
        legal = [n for n in range(1, heads + 1) if fits(n)]
        raise ValueError(
            f"context={ranks} with context_method='ulysses' cannot divide {heads} query heads and {kv_heads} "
            f"key/value heads; legal are {legal}, and any number with context_method='ring'"
        )


def whole_mask(mask: AttentionMask, axis: Axis) -> AttentionMask:
    """The mask of all columns from each rank's mask of its own; made once in a forward pass."""
    if "whole" not in mask._made:
        length = mask.queries * axis.size
        real = None if mask.real_keys is None else _side_by_side(mask.real_keys.to(torch.uint8), axis).bool()
        documents = None if mask.query_documents is None else _side_by_side(mask.query_documents, axis)
        mask._made["whole"] = AttentionMask(
            mask.causal, length, length, real, documents, documents, mask.window, blocks=mask.blocks
        )
    whole: AttentionMask = mask._made["whole"]
    return whole


def _side_by_side(tensor_bl: Tensor, axis: Axis) -> Tensor:
    return stacked(tensor_bl, axis).transpose(0, 1).flatten(1, 2)


# region exchange
def heads_to_columns(x: Tensor, axis: Axis) -> Tensor:
    """[b,h,l,k], all heads of this rank's columns -> [b,h/n,n*l,k], this rank's heads of all columns."""
    b, h, length, k = x.shape
    by_rank = x.view(b, axis.size, h // axis.size, length, k).transpose(0, 1)  # [n,b,h/n,l,k]
    arrived = exchange_forward_exchange_backward(by_rank, axis)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)


def columns_to_heads(x: Tensor, axis: Axis) -> Tensor:
    """The way back: [b,h/n,n*l,k] -> [b,h,l,k]."""
    by_rank = x.unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3, 4)  # [n,b,h/n,l,k]
    return exchange_forward_exchange_backward(by_rank, axis).transpose(0, 1).flatten(1, 2)


# endregion
