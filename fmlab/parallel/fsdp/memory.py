"""Memory that is given back while the tensors that live in it are kept.

The backward pass needs the weights that the forward pass has used, and autograd keeps them: often not the
parameter itself but a view of it (a transpose). Those views hold on to the parameter's storage, so its memory
can be given back only by making the storage itself smaller; refilled later, every view is right again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# An operator of its own, so that meters which watch operators see memory come and go.
_LIBRARY = torch.library.Library("fmlab", "FRAGMENT")
_LIBRARY.define("resize_storage_(Tensor(a!) tensor, int size) -> ()")


def _resize(tensor: Tensor, size: int) -> None:
    tensor.untyped_storage().resize_(size)


_LIBRARY.impl("resize_storage_", _resize, "CompositeExplicitAutograd")
_resize_storage: Callable[[Tensor, int], None] = torch.ops.fmlab.resize_storage_


def give_back(room: Tensor) -> None:
    """Free the memory of `room`, a tensor that covers its storage; what lives in it must not be read."""
    _resize_storage(room, 0)


def take_again(room: Tensor) -> None:
    """Memory for `room` again, with anything in it."""
    _resize_storage(room, room.numel() * room.element_size())
