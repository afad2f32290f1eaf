"""A layout's grid of ranks as torch's DeviceMesh."""

from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fmlab.parallel.grid import Grid

#: Slowest first. The data axis is always taken apart into copies and the shards of one copy.
NAMES = ("pipeline", "replica", "shard", "tensor")

_MESHES: dict[tuple[object, ...], DeviceMesh] = {}


def device_mesh(grid: Grid, device_type: str) -> DeviceMesh:
    """The grid as a mesh with the dims `NAMES`; every rank calls it. An axis order of any kind is kept.

    Dims of one rank are left out, but for "shard". Equal meshes are one object, which lives as long as the
    world: DTensor remembers plans of communication by what a mesh looks like, with the mesh's process groups
    in them.
    """
    names = [name for name in NAMES if grid.sizes[name] > 1 or name == "shard"]
    sizes = [grid.sizes[name] for name in names]
    ranks = []
    for place in product(*(range(size) for size in sizes)):
        at = dict.fromkeys(NAMES, 0) | dict(zip(names, place, strict=True))
        data = at["replica"] * grid.sizes["shard"] + at["shard"]
        ranks.append(grid.rank(pipeline=at["pipeline"], data=data, tensor=at["tensor"]))
    key = (id(dist.group.WORLD), device_type, tuple(names), tuple(sizes), tuple(ranks))
    if key not in _MESHES:
        _MESHES[key] = DeviceMesh(device_type, torch.tensor(ranks).view(sizes), mesh_dim_names=tuple(names))
    return _MESHES[key]


def part(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """The sub-mesh of some dims."""
    here = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh if here == mesh.mesh_dim_names else mesh[here]
