"""Ranks that work on the same rows must be given the same ones; a mistake would train on neither."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmlab.parallel.layout import Batch
from fmlab.parallel.mesh import Mesh


def check_same_batches(batches: Sequence[Batch], mesh: Mesh) -> None:
    """Compare the micro-batches of the ranks that differ by their tensor or context place only.

    (Stages of a pipeline compare theirs themselves, see fmlab.parallel.pipeline.agree.)
    Every rank calls it. Raises ValueError on every rank, also where only others differ, so that none waits.
    """
    where = (mesh.coordinates["data"], mesh.coordinates["pipeline"])
    mine = (where, [_fingerprint(batch) for batch in batches])
    every = mesh.axis(*mesh.grid.order).gather_objects(mine)
    first: dict[tuple[int, int], tuple[int, Any]] = {}
    for rank, (place, prints) in enumerate(every):
        known_rank, known = first.setdefault(place, (rank, prints))
        if prints != known:
            raise ValueError(
                f"ranks {known_rank} and {rank} have one place on the data axis ({place[0]}) and must be "
                f"given the same micro-batches, but {_difference(known, prints)}; give each rank the rows "
                "of its place: layout.split(batch, layout.data_rank(rank))"
            )


def _fingerprint(batch: Batch) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(tensor.shape), _digest(tensor)) for name, tensor in batch.items()}


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def _difference(known: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    if len(known) != len(other):
        return f"one has {len(known)} of them and the other {len(other)}"
    for index, (a, b) in enumerate(zip(known, other, strict=True)):
        names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        if names:
            shapes = [mine[names[0]][0] if names[0] in mine else None for mine in (a, b)]
            how = f"shapes {shapes[0]} and {shapes[1]}" if shapes[0] != shapes[1] else "other numbers"
            return f"{names[0]!r} of micro-batch {index} has {how}"
    return "they are in another order"
