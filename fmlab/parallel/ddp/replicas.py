"""Replicas must start equal, and stay so: their gradients are equal, so nothing corrects a difference."""

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_SHOWN = 3


def check_same_model(model: nn.Module, group: Any) -> None:
    """Compare names, shapes, element types and frozen flags over ranks, before anything is sent.

    Raises ValueError on every rank, naming what differs from rank 0.
    """
    mine = {
        name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    }
    digest = hashlib.sha256(repr(list(mine.items())).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    every: list[Any] = [None] * len(digests)
    dist.all_gather_object(every, mine, group=group)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, other = every[0], every[rank]
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    shown = [
        f"{n}: {first.get(n, 'absent')} on rank 0, {other.get(n, 'absent')} on rank {rank}" for n in names
    ]
    raise ValueError(
        "the ranks hold different models; build the same one on each. "
        + ("; ".join(shown[:_SHOWN]) if names else "the parameters are registered in another order")
        + (f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    )


def check_same_settings(settings: str, group: Any) -> None:
    """Compare what the ranks were asked for, before they divide anything or make a group.

    Raises ValueError on every rank, naming the first that was asked for something else than rank 0.
    """
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, settings, group=group)
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            raise ValueError(
                f"the ranks were asked for different things: rank 0 for {every[0]}, rank {rank} for "
                f"{theirs}; give all the same"
            )


def check_no_batch_statistics(model: nn.Module) -> None:
    """Refuse batch norm: each rank would normalise by its own rows, so that no layout equals one device.

    Raises ValueError that names the layer.
    """
    for name, module in model.named_modules():
        by_rows = isinstance(module, _BatchNorm) or getattr(module, "needs_whole_batch", False)
        if by_rows and not isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, whose statistics would differ from rank to rank; "
                "use layer or group norm, or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) on GPUs"
            )


# region broadcast
@torch.no_grad()
def broadcast_from_first(model: nn.Module, group: Any) -> None:
    """Give every rank the weights and buffers of the first, one message for each element type."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for tensors in kinds.values():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


# endregion


@torch.no_grad()
def differing(tensors: Mapping[str, Tensor], group: Any) -> list[str]:
    """The names of the tensors that are not bitwise equal on all ranks; every rank calls it.

    Compares a fingerprint of each tensor's bits.
    """
    if not tensors:
        return []
    marks = torch.stack([fingerprint(tensor) for tensor in tensors.values()])  # [n, 2] int64
    low, high = marks.clone(), marks.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return [name for name, same in zip(tensors, (low == high).all(dim=1).tolist(), strict=True) if not same]


_ROW = 4096  # integers
_WORDS = {2: torch.int16, 4: torch.int32}


def fingerprint(tensor: Tensor) -> Tensor:
    """Two numbers that a change of any bit changes: [2] int64, on the tensor's device.

    The tensor's bits, read as integers, lie in rows of _ROW: the sum of all of them, and of the columns' sums
    times the column's number. Both are taken modulo 2**64, and no copy of the tensor is made.
    """
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    words = flat.view(_WORDS.get(min(tensor.itemsize, 4), torch.uint8))
    whole = len(words) // _ROW * _ROW
    columns = words[:whole].view(-1, _ROW).sum(0, dtype=torch.int64)
    columns[: len(words) - whole] += words[whole:]
    place = torch.arange(1, _ROW + 1, device=columns.device)
    return torch.stack([columns.sum(), (columns * place).sum()])


def run_on_first(action: Callable[[], None], group: Any) -> None:
    """Run `action` on the group's first rank; the others wait for it and raise what it raised."""
    outcome: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            action()
        except Exception as error:
            outcome[0] = sendable(error)
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    if outcome[0] is not None:
        raise outcome[0]


def sendable(error: Exception) -> Exception:
    """The error itself if other ranks can raise it too, else a RuntimeError that says the same.

    An exception with an __init__ of its own often cannot be pickled, or not be made again.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        said = RuntimeError(f"{type(error).__name__}: {error}")
        said.__cause__ = error
        return said
    return error
