"""Parameters laid end to end in one vector, of which every rank owns an equal, contiguous slice.

    parameters   | a         | b  | c                | padding
    slices       | rank 0         | rank 1          | rank 2          |

The cuts fall where they fall: a parameter may lie on two ranks, and a rank may hold nothing of it. So all
ranks own equally much, whatever the shapes (Rajbhandari et al. 2019, arXiv:1910.02054, section 5).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from fmlab.parallel.build import Build
from fmlab.parallel.ddp import plan_buckets
from fmlab.parallel.mesh import Axis


# region slices
@dataclass(frozen=True)
class Slices:
    """How one parameter is divided (a Division of the ledger): it begins at `offset` of a vector of which
    each rank owns `length` elements.

    A piece is a column of elements with as many dims as the parameter, so that an optimizer which treats
    matrices and vectors differently still can.
    """

    offset: int
    length: int

    def bounds(self, numel: int, rank: int) -> tuple[int, int]:
        """Which elements of a parameter of `numel` lie in the slice of `rank`: first, and end (not
        included)."""
        first = min(max(rank * self.length - self.offset, 0), numel)
        end = min(max((rank + 1) * self.length - self.offset, 0), numel)
        return first, end

    def shard(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """What `rank` owns of `tensor`: [k, 1, ...], k is 0 where the slice has none of it."""
        first, end = self.bounds(tensor.numel(), rank)
        return as_column(tensor.reshape(-1)[first:end], tensor.dim())

    def unshard(self, shards: list[Tensor], shape: torch.Size) -> Tensor:
        """The tensor of `shape` from every rank's piece."""
        return torch.cat([shard.reshape(-1) for shard in shards]).view(shape)


# endregion


def as_column(elements: Tensor, dims: int) -> Tensor:
    """`elements` [k] as [k, 1, ...] with `dims` dims, at least one."""
    return elements.view(len(elements), *[1] * (dims - 1))


class Flat:
    """Parameters of one element type in one vector.

    names, shapes, rules: of the parameters, in their order in the vector
    axis:   the ranks that each own a slice; copies: the ranks that own the same slice but have other data
    length: elements of a slice; size: of the vector, padding included (length times the ranks of `axis`)
    dtype:  of the parameters; wide: of their gradients' sum and of what the optimizer updates: fp32 at least
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], axis: Axis, copies: Axis) -> None:
        self.axis, self.copies = axis, copies
        self.names = list(parameters)
        self.shapes = {name: p.shape for name, p in parameters.items()}
        first = next(iter(parameters.values()))
        self.dtype, self.device, self.trainable = first.dtype, first.device, first.requires_grad
        self.wide = (
            torch.promote_types(first.dtype, torch.float32) if first.is_floating_point() else self.dtype
        )
        *offsets, self.numel = accumulate((p.numel() for p in parameters.values()), initial=0)
        self.length = -(-self.numel // axis.size)
        self.size = self.length * axis.size
        self.rules = {name: Slices(o, self.length) for name, o in zip(self.names, offsets, strict=True)}

    @property
    def own(self) -> slice:
        """This rank's part of the vector."""
        return slice(self.axis.rank * self.length, (self.axis.rank + 1) * self.length)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The whole parameters as views into a vector [size]."""
        return {
            name: vector[rule.offset : rule.offset + self.shapes[name].numel()].view(self.shapes[name])
            for name, rule in self.rules.items()
        }

    def pieces(self, own: Tensor) -> dict[str, Tensor]:
        """This rank's pieces of the parameters as views into its slice [length]."""
        found = {}
        for name, rule in self.rules.items():
            first, end = rule.bounds(self.shapes[name].numel(), self.axis.rank)
            start = max(rule.offset + first - self.own.start, 0)
            found[name] = as_column(own[start : start + end - first], len(self.shapes[name]))
        return found

    def fill(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """A vector [size] with these values, zeros behind them."""
        vector = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for name, view in self.views(vector).items():
            view.copy_(parameters[name].detach())
        return vector


class Axes:
    """Along which axes a parameter's states are divided, and along which they are copied."""

    def __init__(self, build: Build) -> None:
        mesh = build.mesh  # every rank makes all of them, in this order
        self.usual = mesh.axis("shard"), mesh.axis("context", "replica")
        self.experts = mesh.axis("expert_replica"), mesh.axis("context")
        self.ledger = build.ledger

    def of(self, name: str) -> tuple[Axis, Axis]:
        """(divided along, copied along). Divided experts are shared out among the ranks that hold the same
        ones."""
        divided = any(cut.axis.name == "expert" for cut in self.ledger.entries[name].cuts)
        return self.experts if divided else self.usual

    def kinds(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
        """The parameters in groups that may share a vector.

        One that several stages of a pipeline hold (a tied embedding) is alone: only then is it cut at the
        same places on all of them.
        """
        groups: dict[object, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            alone = name if len(self.ledger.entries[name].stages) > 1 else ""
            groups.setdefault((alone, id(self.of(name)[0])), {})[name] = parameter
        yield from groups.values()


def plan_flats(parameters: Mapping[str, nn.Parameter], axes: Axes, bucket_bytes: float) -> list[Flat]:
    """The parameters in vectors of at most `bucket_bytes` (see plan_buckets), in the order of the backward
    pass."""
    flats = []
    for group in axes.kinds(parameters):
        for names in plan_buckets(group, bucket_bytes):
            flats.append(Flat({name: group[name] for name in names}, *axes.of(names[0])))
    return flats
