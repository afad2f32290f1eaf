"""What every wrapper asks of its tensors before a kernel starts. Each function raises ValueError."""

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ELEMENTS = 2**31 - 1  # offsets are 32-bit integers
MOST_COLUMNS = 2**16  # a row that one program holds at once


def same_kind(**tensors: Tensor | None) -> None:
    """All on one device, of one dtype that the kernels know, and small enough for 32-bit offsets."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, like = next(iter(given.items()))
    for name, tensor in given.items():
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"{name} is {tensor.dtype}; the kernels compute in fp32 and take {known}")
        if tensor.dtype != like.dtype or tensor.device != like.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, {first} is {like.dtype} on {like.device}; "
                "give all of one dtype and on one device"
            )
        if tensor.numel() > MOST_ELEMENTS:
            raise ValueError(f"{name} has {tensor.numel():,} numbers; offsets of 32 bits reach 2^31 - 1")


def shape(name: str, tensor: Tensor, wanted: Sequence[int], legend: str) -> None:
    """`tensor` has exactly the shape `wanted`, which is called `legend` in the message."""
    if tuple(tensor.shape) != tuple(wanted):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {legend} = {list(wanted)}")


def rows_and_columns(name: str, tensor: Tensor) -> tuple[int, int]:
    """The rows and the columns of a tensor whose last dimension a program holds at once."""
    if tensor.ndim < 1:
        raise ValueError(f"{name} is a single number; give a tensor with at least one dimension")
    columns = tensor.shape[-1]
    if not 1 <= columns <= MOST_COLUMNS:
        raise ValueError(
            f"{name} has rows of {columns:,} numbers; a program holds a whole row, of 1 to {MOST_COLUMNS:,}"
        )
    return tensor.numel() // columns, columns


def tile(name: str, size: int, least: int = 16) -> None:
    """A side of a tile: a power of two, as tl.arange asks, and no smaller than a tensor core's."""
    if size < least or size & (size - 1):
        raise ValueError(f"{name}={size} is not a tile's side; give a power of two from {least}")
