"""Ranks as points of a grid, one axis for each way of dividing the work: arithmetic only, no process needed.

    Grid({"tensor": 4, "data": 2, "pipeline": 2}).line(0, "tensor")     # [0, 1, 2, 3]
                                                 .line(0, "data")       # [0, 4]
                                                 .line(0, "pipeline")   # [0, 8]

Ranks are numbered so that the first axis of the order runs fastest: neighbours in number, which usually share
a host, are neighbours along it. Tensor parallelism talks most and comes first, a pipeline talks least and
comes last (Narayanan et al. 2021, arXiv:2104.04473, section 5.4).

The axis "data" has two pairs of parts, for what divides it further:

    data = replica x shard            hybrid sharding: states divided along "shard", copied along "replica"
    data = expert_replica x expert    experts are divided along "expert", copied along "expert_replica"
"""

from collections.abc import Mapping, Sequence
from math import isqrt, prod

AXES = ("tensor", "context", "data", "pipeline")
_PARTS = {"shard": "replica", "replica": "shard", "expert": "expert_replica", "expert_replica": "expert"}


class Grid:
    """The coordinates of `world_size` ranks."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        order: Sequence[str] = AXES,
        shards: int | None = None,
        experts: int = 1,
    ) -> None:
        """sizes: degree of each axis, 1 where not given. order: the axis along which ranks run fastest first.

        shards: how many consecutive data ranks share one copy of the states (default: all of them).
        experts: how many consecutive data ranks share one copy of the experts.

        Raises ValueError for an unknown axis, an order that is none of all axes, and parts that do not divide
        the data axis.
        """
        if unknown := sorted(set(sizes) - set(AXES)):
            raise ValueError(f"there is no axis {unknown[0]!r}; legal are {', '.join(AXES)}")
        if sorted(order) != sorted(AXES):
            raise ValueError(f"order={tuple(order)}: name each of {', '.join(AXES)} once, fastest first")
        self.order = tuple(order)
        self.sizes = {axis: sizes.get(axis, 1) for axis in self.order}
        data = self.sizes["data"]
        inner = {"shard": data if shards is None else shards, "expert": experts}
        for name, size in inner.items():
            if size < 1 or data % size:
                legal = divisors(data)
                raise ValueError(f"{name}={size} does not divide data={data}; legal are {legal}")
            self.sizes[name], self.sizes[_PARTS[name]] = size, data // size

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return prod(self.sizes[axis] for axis in self.order)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands, along every axis and every part of one."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a grid of {self.world_size}")
        found = {}
        for axis in self.order:
            rank, found[axis] = divmod(rank, self.sizes[axis])
        for inner in ("shard", "expert"):
            found[_PARTS[inner]], found[inner] = divmod(found["data"], self.sizes[inner])
        return found

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates of the four axes, 0 where not given."""
        number, stride = 0, 1
        for axis in self.order:
            number += coordinates.get(axis, 0) * stride
            stride *= self.sizes[axis]
        return number

    def line(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` along these axes (or parts of axes) only, in ascending order."""
        return next(line for line in self.lines(*axes) if rank in line)

    def lines(self, *axes: str) -> list[list[int]]:
        """All such lines: each rank is in exactly one."""
        fixed = self._fixed(axes)
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            where = self.coordinates(rank)
            lines.setdefault(tuple(where[axis] for axis in fixed), []).append(rank)
        return list(lines.values())

    def _fixed(self, axes: Sequence[str]) -> list[str]:
        """What two ranks of one line have in common: the other axes, and the other part of a divided one."""
        if unknown := sorted(set(axes) - set(self.sizes)):
            raise ValueError(f"there is no axis {unknown[0]!r}; legal are {', '.join(self.sizes)}")
        parts = [axis for axis in axes if axis in _PARTS]
        if len(parts) > 1 or (parts and "data" in axes):
            raise ValueError(f"{axes} name the data axis more than once")
        others = [axis for axis in self.order if axis not in axes and not (axis == "data" and parts)]
        return others + [_PARTS[part] for part in parts]

    def copies(self, *divided: str) -> list[str]:
        """The axes along which a tensor is the same on every rank, when it is divided along `divided`."""
        parts = [axis for axis in divided if axis in _PARTS]
        kept = [axis for axis in self.order if axis not in divided and axis != "data"]
        if "data" in divided or any(_PARTS[part] in parts for part in parts):
            return kept
        return kept + ([_PARTS[parts[0]]] if parts else ["data"])


def divisors(number: int) -> list[int]:
    """The whole numbers that divide `number`, ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
