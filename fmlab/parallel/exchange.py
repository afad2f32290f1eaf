"""An all-to-all that can be differentiated: what goes out comes back as a gradient, the other way round."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmlab.parallel.mesh import Axis


def exchange_forward_exchange_backward(
    x: Tensor, axis: Axis, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
) -> Tensor:
    """Rows (dim 0) of `x` to the ranks of `axis`, `send[r]` to rank r and `receive[r]` from it, or all alike.

    Every rank calls it, forward and backward, also with nothing to send.
    """
    exchanged: Tensor = _Exchange.apply(x, axis, send, receive)
    return exchanged


# region exchange
class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, send: Sequence[int] | None, receive: Sequence[int] | None
    ) -> Tensor:
        ctx.settings = (axis, send, receive)
        return axis.all_to_all(x, send, receive)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None, None]:
        axis, send, receive = ctx.settings
        return axis.all_to_all(d_x, receive, send), None, None, None


# endregion
