"""Where the elements of a tensor are: on every rank, cut along a dim, or as parts of a sum.

A lesson-sized GSPMD (Xu et al. 2021, arXiv:2105.04663, section 3): from the placements of what a node reads
follows that of what it gives. Rules know nothing of layers; Megatron's f and g come out by themselves.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: On every rank, the same.
REPLICATED = "replicated"
#: On every rank a tensor of the full shape; the value is the sum of all of them.
PARTIAL = "partial"
#: On every rank a value of its own, such as the numbers of its rows: only vocabulary.py reads those.
OWN = "its own"


@dataclass(frozen=True)
class Shard:
    """Cut along `dim`: rank r has the r-th piece.

    parts: the dim is that many equal blocks one behind the other, and rank r has the r-th piece of each.
        Queries, keys and values in one matrix are 3 parts: a rank has the same heads of each.
    """

    dim: int
    parts: int = 1

    def __str__(self) -> str:
        parts = f" in each of {self.parts} parts" if self.parts > 1 else ""
        return f"cut along dim {self.dim}{parts}"


Placement = Shard | str
#: A node that gives several tensors has one for each.
Placements = Placement | tuple[Placement, ...]


def local_shape(shape: tuple[int, ...], placement: Placement, ranks: int) -> tuple[int, ...]:
    """What a rank has of a tensor of this shape. Raises ValueError where it cannot be cut evenly."""
    if not isinstance(placement, Shard):
        return shape
    dim, parts = placement.dim, placement.parts
    if not 0 <= dim < len(shape):
        raise ValueError(f"{list(shape)} has no dim {dim}; legal: 0 to {len(shape) - 1}")
    if parts < 1 or shape[dim] % (parts * ranks):
        parts_text = f"{parts} parts of {ranks} pieces" if parts != 1 else f"{ranks} pieces"
        raise ValueError(f"dim {dim} of {list(shape)} cannot be cut into {parts_text} of one size")
    return (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])


def local_part(tensor: Tensor, placement: Placement, rank: int, ranks: int) -> Tensor:
    """What rank `rank` has of a whole tensor, contiguous. Raises ValueError where it cannot be cut evenly."""
    local_shape(tuple(tensor.shape), placement, ranks)
    if not isinstance(placement, Shard):
        return tensor
    dim = placement.dim
    pieces = tensor.unflatten(dim, (placement.parts, -1)).chunk(ranks, dim + 1)
    return pieces[rank].flatten(dim, dim + 1).contiguous()


def shard_parameters(
    model: torch.nn.Module, sharded: Mapping[str, int | Shard], rank: int, ranks: int
) -> None:
    """Replace the named parameters of a model by what this rank has of them; tied ones stay tied.

    The whole weights must be the same on all ranks before. An optimizer is made after, of the new parameters.

    sharded: parameter name -> the dim along which it is cut, or a Shard. Raises ValueError for unknown names
    and for dims that cannot be cut evenly, before anything is replaced.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, placement in placed(sharded, named).items():
        local_shape(tuple(named[name].shape), placement, ranks)
    for name, placement in placed(sharded, named).items():
        whole = named[name]
        part = local_part(whole.detach(), placement, rank, ranks).clone()
        local = torch.nn.Parameter(part, whole.requires_grad)
        for other, parameter in named.items():
            if parameter is whole:
                owner, _, leaf = other.rpartition(".")
                setattr(model.get_submodule(owner), leaf, local)


def placed(sharded: Mapping[str, int | Shard], known: Mapping[str, object]) -> dict[str, Shard]:
    """Shards by name. Raises ValueError for a name that is not among the `known` ones."""
    unknown = [name for name in sharded if name not in known]
    if unknown:
        raise ValueError(f"no parameter is called {unknown[0]!r}; legal: {', '.join(known)}")
    return {name: where if isinstance(where, Shard) else Shard(where) for name, where in sharded.items()}


# region viewed
def viewed(shape: tuple[int, ...], new: tuple[int, ...], shard: Shard, ranks: int) -> Shard | None:
    """Where the cut of a tensor [shape] lies once the same elements are seen as [new]; None if nowhere.

    In front of the cut there are `outer` pieces, whatever the dims that count them: [12, 3 x 16] cut in 3
    parts has 36 in front, and so has [12, 3, 16] along dim 2.
    """
    outer = math.prod(shape[: shard.dim]) * shard.parts
    before = 1
    for dim, length in enumerate(new):
        if before * length > outer:
            parts, rest = divmod(outer, before)
            even = rest == 0 and length % (parts * ranks) == 0
            return Shard(dim, parts) if even else None
        before *= length
    return None


# endregion


def broadcast(inputs: list[tuple[tuple[int, ...], Placement]], shape: tuple[int, ...]) -> Placement | None:
    """The placement of a result [shape] of which each element needs one of each input; None if it has none.

    inputs: shape and placement of each; shapes are aligned at their last dims.
    """
    cuts = set()
    for own, placement in inputs:
        if placement == PARTIAL:
            return None
        if isinstance(placement, Shard):
            cuts.add(Shard(placement.dim + len(shape) - len(own), placement.parts))
    if not cuts:
        return REPLICATED
    cut = cuts.pop()
    if cuts:
        return None
    for own, placement in inputs:
        dim = cut.dim - (len(shape) - len(own))
        whole = placement == REPLICATED and dim >= 0 and own[dim] > 1
        if whole:
            return None  # a rank would need to know which piece of it is its own
    return cut
